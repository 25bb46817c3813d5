"""Log of one job's latest events, numbered, for watchers. Pure: no clock, no I/O."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice

from shoal._limits import catalogue
from shoal.events import CheckpointEnded, EvaluationEnded, Event, LogLine, MetricsReported, StateChanged

# Estimated bytes in memory of an event without its text, and of a metric without its name: CPython's objects, and an
# entry in a dict.
_EVENT_BYTES, _METRIC_BYTES = 500, 150
# Numbers reserved at a time. A restart of the coordinator skips at most this many.
NUMBERS_AHEAD = 10_000
# The stored events: a watcher may wait for them across a restart of the coordinator.
Kept = StateChanged | CheckpointEnded | EvaluationEnded


class EventLog:
    """The latest events of one job, numbered from 1.

    State changes and the results of checkpoints and evaluations are stored. Log lines and metrics are not, but no
    number is used twice: the log reserves numbers in advance (`reserved_sequence`), and a restored log continues after
    all of them. The numbers therefore have gaps where the coordinator restarted, and where log lines and metrics were
    dropped.
    Stored and other events have separate limits, so that many reports do not displace a job's evaluations.

    Args:
        kept_changed: called with the number of a stored event that was added or dropped.
        reserved_changed: called when `reserved_sequence` has changed.
        max_events: maximum number of stored events; also that of all other events.
        max_stored_bytes: maximum estimated size of the stored events. The newest is kept, however large.
        max_other_bytes: maximum estimated size of all other events.
        max_log_bytes: maximum size of the log lines.

    Attributes:
        other_bytes: estimated size of the events that are not stored.
        last: sequence number of the latest event; after a restore, the largest that it can have been.
        max_events: see above; a smaller number applies from the next event.
        reserved_sequence: the largest reserved number.
        ended: whether the latest event is the job's last.
        appended: called after each new event; the owner of the log may set it.
    """

    def __init__(
        self,
        kept_changed: Callable[[int], None] = lambda _: None,
        reserved_changed: Callable[[], None] = lambda: None,
        *,
        max_events: int = catalogue.JOB_EVENTS.default,
        max_stored_bytes: int = catalogue.JOB_STORED_EVENT_BYTES.default,
        max_other_bytes: int = catalogue.JOB_EVENT_BYTES.default,
        max_log_bytes: int = catalogue.JOB_OUTPUT_BYTES.default,
    ) -> None:
        self._kept_changed, self._reserved_changed = kept_changed, reserved_changed
        self.max_events, self._max_log_bytes = max_events, max_log_bytes
        self._max_stored_bytes, self._max_other_bytes = max_stored_bytes, max_other_bytes
        self._kept: dict[int, Kept] = {}  # the stored events, by number, in order
        self._others: deque[Event] = deque()
        self._log_bytes = 0  # of the log lines among them
        self._stored_bytes = self.other_bytes = 0  # estimated, of _kept and _others
        self._newest_stored_bytes = 0  # of the newest of _kept
        self.last = 0
        self.reserved_sequence = 0
        self.ended = False
        self.appended: Callable[[], object] = lambda: None

    def restore(self, events: Iterable[Kept], reserved_sequence: int) -> None:
        """Restores a new log from the stored events of an earlier one."""
        for event in sorted(events, key=_number):
            self._add(event)
        self._trim()
        self.last = self.reserved_sequence = reserved_sequence

    @property
    def next(self) -> int:
        """The sequence number of the next event."""
        return self.last + 1

    @property
    def droppable_stored_bytes(self) -> int:
        """Estimated size of the stored events without the newest, which is never dropped."""
        return self._stored_bytes - self._newest_stored_bytes

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
        if self.last > self.reserved_sequence:
            self.reserved_sequence = self.last + NUMBERS_AHEAD
            self._reserved_changed()
        self._add(event)
        if event.sequence in self._kept:
            self._kept_changed(event.sequence)
        self._trim()
        self.appended()

    def after(self, sequence: int) -> list[Event]:
        """Returns the remembered events with larger numbers, in order."""
        return self.copied_after(sequence)()

    def copied_after(self, sequence: int) -> Callable[[], list[Event]]:
        """Copies the references to those events.

        Returns:
            A function that returns them in order. It does not read the log, so the caller needs no lock for it: to sort
            40,000 events takes much longer than to copy their references.
        """
        most = max(self.last - sequence, 0)  # every event has a number of its own; most watchers need only a few
        newest = [*islice(reversed(self._kept.values()), most), *islice(reversed(self._others), most)]
        return lambda: sorted((event for event in newest if event.sequence > sequence), key=_number)

    def drop_stored(self) -> None:
        """Drops the oldest stored event, which must not be the only one."""
        oldest = next(iter(self._kept))
        self._stored_bytes -= _bytes(self._kept.pop(oldest))
        self._kept_changed(oldest)

    def drop_other(self) -> None:
        """Drops the oldest of the other events, of which there must be one."""
        dropped = self._others.popleft()
        self._log_bytes -= _log_bytes(dropped)
        self.other_bytes -= _bytes(dropped)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        kept, others = list(self._kept), [*map(_number, self._others)]
        assert kept == sorted(kept) == [*map(_number, self._kept.values())], "a number out of order"
        assert others == sorted(set(others) - {*kept}), "a number out of order, or twice"
        assert max([*kept, *others], default=0) <= self.last <= self.reserved_sequence
        assert not any(isinstance(event, Kept) for event in self._others)
        assert self._log_bytes == sum(map(_log_bytes, self._others)) <= self._max_log_bytes
        assert max(len(kept), len(others)) <= self.max_events
        assert self._stored_bytes == sum(map(_bytes, self._kept.values()))
        assert self._stored_bytes <= self._max_stored_bytes or len(kept) == 1
        assert self.other_bytes == sum(map(_bytes, self._others)) <= self._max_other_bytes

    def _trim(self) -> None:
        """Drops the oldest events beyond the limits."""
        while len(self._kept) > 1 and (
            len(self._kept) > self.max_events or self._stored_bytes > self._max_stored_bytes
        ):
            self.drop_stored()
        while (
            len(self._others) > self.max_events
            or self._log_bytes > self._max_log_bytes
            or self.other_bytes > self._max_other_bytes
        ):
            self.drop_other()

    def _add(self, event: Event) -> None:
        if isinstance(event, Kept):
            self._kept[event.sequence] = event
            self._newest_stored_bytes = _bytes(event)
            self._stored_bytes += self._newest_stored_bytes
        else:
            self._others.append(event)
            self.other_bytes += _bytes(event)
            self._log_bytes += _log_bytes(event)
        self.ended = isinstance(event, StateChanged) and event.state.finished


def _number(event: Event) -> int:
    return event.sequence


def _bytes(event: Event) -> int:
    """Returns the estimated bytes of an event in memory."""
    text = ""
    values: Mapping[str, float] = {}
    match event:
        case StateChanged(reason=text) | LogLine(text=text) | CheckpointEnded(failure=text):
            pass
        case MetricsReported(values=values):
            pass
        case EvaluationEnded():
            values = event.result.values
    return _EVENT_BYTES + sys.getsizeof(text) + sum(_METRIC_BYTES + sys.getsizeof(name) for name in values)


def _log_bytes(event: Event) -> int:
    return len(event.text) if isinstance(event, LogLine) else 0
