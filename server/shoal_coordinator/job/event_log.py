"""What happened to a job, for those who watch it: the latest events, numbered. Pure: no clock, no I/O."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator

from shoal.events import CheckpointEnded, EvaluationEnded, Event, LogLine, StateChanged

MAX_EVENTS = 20_000  # of those that are kept in the store, and as many others
MAX_LOG_BYTES = 8 << 20
# Numbers that are set aside at a time. So many at most are skipped by a restart.
NUMBERS_AHEAD = 10_000
# Those that are kept in the store: what they say of the job was promised to somebody, who may still wait for it.
Kept = StateChanged | CheckpointEnded | EvaluationEnded


class EventLog:
    """The last events of one job, numbered from 1.

    Those that change the job's state, or say what became of a checkpoint or what an evaluation found, are kept in the
    coordinator's store; log lines and figures are not, but no number is given out twice: before one is, numbers up to
    some way ahead of it are set aside (`numbered`), and a log that was restored goes on behind all of them. So there
    are gaps where the coordinator was restarted, and where log lines and figures were forgotten. These are bounded
    apart from the others: a job's evaluations are there for whoever comes later, however much was reported since.

    Args:
        kept_changed: told the number of an event whose record is another one now: it came, or was forgotten.
        numbered_changed: told that `numbered` is another one now.
        max_events: how many are remembered that are kept in the store, and how many others.
        max_log_bytes: of the log lines among them.
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
        self._kept: dict[int, Kept] = {}  # those that are kept in the store, by number, in order
        self._others: deque[Event] = deque()
        self._log_bytes = 0  # of the log lines among them
        self.last = 0  # the latest event's sequence number; restored, the last one that it may have been
        self.numbered = 0  # what comes before a restart has no larger number
        self.ended = False  # the latest event is the job's last

    def restore(self, events: Iterable[Kept], numbered: int) -> None:
        """Takes up, in a new log, what was kept of an earlier one."""
        for event in sorted(events, key=_number):
            self._add(event)
        self.last = self.numbered = numbered

    @property
    def next(self) -> int:
        """The sequence number of the event to come."""
        return self.last + 1

    @property
    def kept(self) -> Iterator[int]:
        """The numbers of the events whose records are kept."""
        return iter(self._kept)

    def find(self, sequence: int) -> Kept | None:
        """An event whose record is kept."""
        return self._kept.get(sequence)

    def append(self, event: Event) -> None:
        """Adds an event, whose sequence number is `next`; forgets the oldest ones where a bound is reached."""
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
        """The events with larger numbers that are kept, in order."""
        found: list[Event] = []
        for events in (self._kept.values(), self._others):
            # From the end, where a watcher that keeps up is.
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
