"""Lanes of one run: connections on which messages arrive in order, or not at all.

A short partition only delays messages, as TCP sends them again. After a longer one both ends learn that the lane is
broken. If a process ends, what it has sent may still arrive.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulation.network import KEEPALIVE_S, REFUSED_S, Network
from simulation.scheduler import Life, Scheduler

# Seconds between two attempts to send a message again.
_RESEND_S = 0.2


@dataclass(eq=False)
class LaneEnd:
    """One end of a lane.

    Attributes:
        life: the process.
        receive: called with each message that arrives here.
        on_broken: called with the reason when this end learns that the lane is broken.
        arriving: when each message on its way to this end may arrive, and the message.
        silent_since: since when messages have not passed; None if they pass.
    """

    life: Life
    receive: Callable[[Any], object]
    on_broken: Callable[[str], object]
    arriving: deque[tuple[float, Any]] = field(default_factory=deque)
    silent_since: float | None = None


class Lane:
    """A connection between two processes.

    Args:
        scheduler: the time.
        network: whose delays and partitions the lane has.
        first, second: the ends.

    Attributes:
        closed: whether it has ended.
    """

    def __init__(self, scheduler: Scheduler, network: Network, first: LaneEnd, second: LaneEnd) -> None:
        self._scheduler, self._network = scheduler, network
        self._ends = first, second
        self.closed = False
        for end in self._ends:
            end.life.on_end[self._end_of_process] = None

    def send(self, to: LaneEnd, message: Any) -> None:
        """Sends a message to an end."""
        if self.closed:
            return
        due, waiting = self._scheduler.now + self._network.delay(), to.arriving
        waiting.append((max(due, waiting[-1][0]) if waiting else due, message))
        if len(waiting) == 1:
            self._scheduler.at(due, lambda: self._deliver(to))

    def other(self, end: LaneEnd) -> LaneEnd:
        """Returns the other end."""
        first, second = self._ends
        return second if end is first else first

    def close(self, by: Life) -> None:
        """Ends the lane. Messages on their way are lost, and the other end learns of the end."""
        self._end(by, "the other end has closed the lane")

    def _deliver(self, to: LaneEnd) -> None:
        scheduler = self._scheduler
        if self.closed or not to.life.alive:
            return
        if to.life.stopped_until > scheduler.now:
            scheduler.at(to.life.stopped_until, lambda: self._deliver(to))
        elif not self._connected:
            self._send_again(to)
        else:
            to.silent_since = None
            while to.arriving and to.arriving[0][0] <= scheduler.now and not self.closed:
                to.receive(to.arriving.popleft()[1])
            if to.arriving:
                scheduler.at(to.arriving[0][0], lambda: self._deliver(to))

    def _send_again(self, to: LaneEnd) -> None:
        now = self._scheduler.now
        to.silent_since = now if to.silent_since is None else to.silent_since
        if now - to.silent_since < KEEPALIVE_S:
            self._scheduler.after(_RESEND_S, lambda: self._deliver(to))
        else:
            self._end(None, "no way to the other end")

    def _end_of_process(self) -> None:
        for end in self._ends:
            if end.life.alive and self._connected and self._scheduler.random.random() < 0.5:
                while end.arriving and not self.closed:  # the kernel sends what the process has sent
                    end.receive(end.arriving.popleft()[1])
        self._end(next(end.life for end in self._ends if not end.life.alive), "the other end has ended")

    def _end(self, by: Life | None, why: str) -> None:
        """Ends the lane. The ends learn of it, except the one that has ended it."""
        if self.closed:
            return
        self.closed = True
        seconds = 0.0 if by is None else REFUSED_S if self._connected else KEEPALIVE_S
        for end in self._ends:
            end.arriving.clear()
            end.life.on_end.pop(self._end_of_process, None)
            if end.life is not by:
                self._scheduler.after(seconds, lambda end=end: self._tell(end, why))  # type: ignore[misc]

    def _tell(self, end: LaneEnd, why: str) -> None:
        if not end.life.alive:
            return
        if end.life.stopped_until > self._scheduler.now:
            self._scheduler.at(end.life.stopped_until, lambda: self._tell(end, why))
        else:
            end.on_broken(why)

    @property
    def _connected(self) -> bool:
        return self._network.connected(self._ends[0].life.name, self._ends[1].life.name)


__all__ = ["Lane", "LaneEnd"]
