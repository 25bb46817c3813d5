"""What happened to a job, for those who watch it: the latest events, numbered. Pure: no clock, no I/O."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

from shoal.events import CheckpointEnded, Evaluated, Event, LogLine, StateChanged

MAX_EVENTS = 20_000
MAX_LOG_BYTES = 8 << 20
# Numbers that are set aside at a time. So many at most are skipped by a restart.
NUMBERS_AHEAD = 10_000
# Those that are kept in the store: what they say of the job was promised to somebody, who may still wait for it.
Kept = StateChanged | CheckpointEnded | Evaluated


class EventLog:
    """The last events of one job, numbered from 1.

    Those that change the job's state, or say what became of a checkpoint or what an evaluation found, are kept in the
    coordinator's store; log lines and figures are not, but no number is given out twice: before one is, numbers up to
    some way ahead of it are set aside (`numbered`), and a log that was restored goes on behind all of them. So there
    are gaps where the coordinator was restarted, and nowhere else.

    Args:
        kept_changed: told the number of an event whose record is another one now: it came, or was forgotten.
        numbered_changed: told that `numbered` is another one now.
        max_events: how many are remembered.
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
        self._events: deque[Event] = deque()
        self._kept: dict[int, Kept] = {}  # those among them that are kept, by number
        self._log_bytes = 0  # of the log lines among them
        self.last = 0  # the latest event's sequence number; restored, the last one that it may have been
        self.numbered = 0  # what comes before a restart has no larger number
        self.ended = False  # the latest event is the job's last

    def restore(self, events: Iterable[Kept], numbered: int) -> None:
        """Takes up, in a new log, what was kept of an earlier one."""
        for event in sorted(events, key=lambda event: event.sequence):
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
        while len(self._events) > self._max_events or self._log_bytes > self._max_log_bytes:
            oldest = self._events.popleft()
            self._log_bytes -= _log_bytes(oldest)
            if self._kept.pop(oldest.sequence, None):
                self._kept_changed(oldest.sequence)

    def after(self, sequence: int) -> list[Event]:
        """The events with larger numbers that are kept, in order."""
        # From the end, where a watcher that keeps up is.
        found: list[Event] = []
        for event in reversed(self._events):
            if event.sequence <= sequence:
                break
            found.append(event)
        return found[::-1]

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        sequences = [event.sequence for event in self._events]
        assert sequences == sorted(set(sequences)), "a number out of order"
        assert max(sequences, default=0) <= self.last <= self.numbered
        assert self._kept == {event.sequence: event for event in self._events if isinstance(event, Kept)}
        assert self._log_bytes == sum(map(_log_bytes, self._events)) <= self._max_log_bytes
        assert len(self._events) <= self._max_events

    def _add(self, event: Event) -> None:
        self._events.append(event)
        self._log_bytes += _log_bytes(event)
        if isinstance(event, Kept):
            self._kept[event.sequence] = event
        self.ended = isinstance(event, StateChanged) and event.state.finished


def _log_bytes(event: Event) -> int:
    return len(event.text) if isinstance(event, LogLine) else 0
