"""Limit of the memory of all jobs' event logs together. Pure: no clock, no I/O."""

from shoal_coordinator.job.event_log import EventLog


class LogBudget:
    """The bytes of the event logs of all jobs, which have one limit.

    Each log has limits of its own, but a coordinator may have a thousand jobs. Beyond the limit, the largest logs lose
    their oldest log lines and metrics. If no log has any, they lose their oldest stored events. The newest stored event
    of a job stays, and does not count.

    Args:
        max_bytes: maximum estimated size of the events of all logs.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._others, self._stored = _Sizes(), _Sizes()

    @property
    def nbytes(self) -> int:
        """Estimated size of the events of all logs."""
        return self._others.total + self._stored.total

    def count(self, log: EventLog) -> None:
        """Counts a log that is new or has changed, and drops events beyond the limit."""
        self._update(log)
        while self.nbytes > self._max_bytes:
            if largest := self._others.largest():
                largest.drop_other()
            elif largest := self._stored.largest():
                largest.drop_stored()
            else:
                return
            self._update(largest)

    def forget(self, log: EventLog) -> None:
        """Stops counting the log of a job that is removed."""
        self._others.set(log, 0)
        self._stored.set(log, 0)

    def _update(self, log: EventLog) -> None:
        self._others.set(log, log.other_bytes)
        self._stored.set(log, log.droppable_stored_bytes)


class _Sizes:
    """Sizes of logs, and one of the largest: no log is twice as large. All methods take constant time."""

    def __init__(self) -> None:
        self.total = 0
        self._sizes: dict[EventLog, int] = {}  # those above 0
        self._by_bits: dict[int, dict[EventLog, None]] = {}  # the same logs, by the number of bits of their size

    def set(self, log: EventLog, size: int) -> None:
        before = self._sizes.pop(log, 0)
        self.total += size - before
        if size:
            self._sizes[log] = size
        bits, bits_before = size.bit_length(), before.bit_length()
        if bits == bits_before:
            return
        if before:
            del self._by_bits[bits_before][log]
            if not self._by_bits[bits_before]:
                del self._by_bits[bits_before]
        if size:
            self._by_bits.setdefault(bits, {})[log] = None

    def largest(self) -> EventLog | None:
        return next(iter(self._by_bits[max(self._by_bits)])) if self._by_bits else None


__all__ = ["LogBudget"]
