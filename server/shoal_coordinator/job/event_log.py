"""Log of one job's latest events, numbered, for watchers. Pure: no clock, no I/O."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from shoal.events import CheckpointEnded, EvaluationEnded, Event, LogLine, StateChanged

MAX_EVENTS = 20_000  # of the stored events, and as many others
MAX_LOG_BYTES = 8 << 20
# Numbers reserved at a time. A restart of the coordinator skips at most this many.
NUMBERS_AHEAD = 10_000
# The stored events: a watcher may wait for them across a restart of the coordinator.
Kept = StateChanged | CheckpointEnded | EvaluationEnded


class EventLog:
    """The latest events of one job, numbered from 1.

    State changes and the results of checkpoints and evaluations are stored. Log lines and metrics are not, but no
    number is used twice: the log reserves numbers in advance (`numbered`), and a restored log continues after all of
    them. The numbers therefore have gaps where the coordinator restarted, and where log lines and metrics were dropped.
    Stored and other events have separate limits, so that many reports do not displace a job's evaluations.

    Args:
        kept_changed: called with the number of a stored event that was added or dropped.
        numbered_changed: called when `numbered` has changed.
        max_events: maximum number of stored events; also that of all other events.
        max_log_bytes: maximum size of the log lines.

    Attributes:
        last: sequence number of the latest event; after a restore, the largest that it can have been.
        numbered: the largest reserved number.
        ended: whether the latest event is the job's last.
    """

    def __init__(
        self,
        kept_changed: Callable[[int], None] = lambda _: None,
        numbered_changed: Callable[[], None] = lambda: None,
        *,
        max_events: int = MAX_EVENTS,
        max_log_bytes: int = MAX_LOG_BYTES,
    ) -> None:
        self._kept_changed, self._numbered_changed = kept_changed, numbered_changed
        self._max_events, self._max_log_bytes = max_events, max_log_bytes
        self._kept: dict[int, Kept] = {}  # the stored events, by number, in order
        self._others: deque[Event] = deque()
        self._log_bytes = 0  # of the log lines among them
        self.last = 0
        self.numbered = 0
        self.ended = False

    def restore(self, events: Iterable[Kept], numbered: int) -> None:
        """Restores a new log from the stored events of an earlier one."""
        for event in sorted(events, key=_number):
            self._add(event)
        self.last = self.numbered = numbered

    @property
    def next(self) -> int:
        """The sequence number of the next event."""
        return self.last + 1

    @property
    def kept(self) -> Iterator[int]:
        """The numbers of the stored events."""
        return iter(self._kept)

    def find(self, sequence: int) -> Kept | None:
        """Returns a stored event by number."""
        return self._kept.get(sequence)

    def append(self, event: Event) -> None:
        """Adds an event with the sequence number `next`, and drops the oldest events beyond the limits."""
        self.last = event.sequence
        if self.last > self.numbered:
            self.numbered = self.last + NUMBERS_AHEAD
            self._numbered_changed()
        self._add(event)
        if event.sequence in self._kept:
            self._kept_changed(event.sequence)
        while len(self._kept) > self._max_events:
            oldest = next(iter(self._kept))
            del self._kept[oldest]
            self._kept_changed(oldest)
        while len(self._others) > self._max_events or self._log_bytes > self._max_log_bytes:
            self._log_bytes -= _log_bytes(self._others.popleft())

    def after(self, sequence: int) -> list[Event]:
        """Returns the remembered events with larger numbers, in order."""
        found: list[Event] = []
        for events in (self._kept.values(), self._others):
            # From the end: most watchers need only the newest events.
            found += itertools.takewhile(lambda event: event.sequence > sequence, reversed(events))
        return sorted(found, key=_number)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        kept, others = list(self._kept), [*map(_number, self._others)]
        assert kept == sorted(kept) == [*map(_number, self._kept.values())], "a number out of order"
        assert others == sorted(set(others) - {*kept}), "a number out of order, or twice"
        assert max([*kept, *others], default=0) <= self.last <= self.numbered
        assert not any(isinstance(event, Kept) for event in self._others)
        assert self._log_bytes == sum(map(_log_bytes, self._others)) <= self._max_log_bytes
        assert max(len(kept), len(others)) <= self._max_events

    def _add(self, event: Event) -> None:
        if isinstance(event, Kept):
            self._kept[event.sequence] = event
        else:
            self._others.append(event)
            self._log_bytes += _log_bytes(event)
        self.ended = isinstance(event, StateChanged) and event.state.finished


def _number(event: Event) -> int:
    return event.sequence


def _log_bytes(event: Event) -> int:
    return len(event.text) if isinstance(event, LogLine) else 0
