"""What happened to a job, for those who watch it: the latest events, numbered. Pure: no clock, no I/O."""

from collections import deque

from shoal.events import Event, LogLine, StateChanged

MAX_EVENTS = 20_000
MAX_LOG_BYTES = 8 << 20


class EventLog:
    """The last events of one job; their sequence numbers begin with 1 and have no gaps."""

    def __init__(self, *, max_events: int = MAX_EVENTS, max_log_bytes: int = MAX_LOG_BYTES) -> None:
        self._max_events, self._max_log_bytes = max_events, max_log_bytes
        self._events: deque[Event] = deque()
        self._log_bytes = 0  # of the log lines among them
        self.last = 0  # the latest event's sequence number
        self.ended = False  # the latest event is the job's last

    @property
    def next(self) -> int:
        """The sequence number of the event to come."""
        return self.last + 1

    def append(self, event: Event) -> None:
        """Adds an event, whose sequence number is `next`; forgets the oldest ones where a bound is reached."""
        self.last = event.sequence
        self._events.append(event)
        self._log_bytes += _log_bytes(event)
        while len(self._events) > self._max_events or self._log_bytes > self._max_log_bytes:
            self._log_bytes -= _log_bytes(self._events.popleft())
        self.ended = isinstance(event, StateChanged) and event.state.finished

    def after(self, sequence: int) -> list[Event]:
        """The events with larger numbers that are kept, in order."""
        wanted = min(len(self._events), max(0, self.last - sequence))
        # From the end, where a watcher that keeps up is.
        return [self._events[-back] for back in range(wanted, 0, -1)]

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        assert [event.sequence for event in self._events] == list(
            range(self.last - len(self._events) + 1, self.last + 1)
        ), "a gap in the sequence"
        assert self._log_bytes == sum(map(_log_bytes, self._events)) <= self._max_log_bytes
        assert len(self._events) <= self._max_events


def _log_bytes(event: Event) -> int:
    return len(event.text) if isinstance(event, LogLine) else 0
