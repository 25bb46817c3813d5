"""Permits of a lock group: which pushes may send their gradients now, so that a step takes a bounded amount of memory.

A push that has arrived *announces* a gradient. It gets a permit before its gradient is read, and holds it until the
gradient is folded or dropped. Gradients are folded in order of rank, so all others wait for the lowest rank whose
gradient is missing. Until this rank has a permit, one permit is kept for it, and in a large group a second one for the
next rank. Pure: no values, locks or clocks.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Any

from shoal import errors
from shoal.v1 import replica_pb2 as pb
from shoal_server.shards.machine.clocks import Clocks
from shoal_server.shards.machine.events import GrantPermit, LockGroupEffect, RefusePermit
from shoal_server.shards.machine.mode import Mode

# Place of a worker in a step's sum: its rank and its incarnation.
_Place = tuple[int, int]


class Permits:
    """The permits of one lock group.

    Args:
        mode: the consistency mode of the group.
        clocks: the admitted workers.

    Attributes:
        limits: how many permits there are; None means that pushes need none.
    """

    def __init__(self, mode: Mode, clocks: Clocks) -> None:
        self._mode, self._clocks = mode, clocks
        self.limits = mode.permit_limits(0)
        # Pushes without a permit: ticket and step. All are of the open step.
        self._waiting: dict[_Place, tuple[Any, int]] = {}
        self._order: list[_Place] = []  # heap of at least the keys of _waiting
        # Pushes with a permit that are not committed: the ticket of the newest call; None if it called another server.
        self._granted: dict[_Place, Any] = {}
        # Numbers of all contributions that were released for folding, and of those that are folded.
        self._released = self._folded = 0

    @property
    def waiting(self) -> int:
        """Number of pushes that wait for a permit."""
        return len(self._waiting)

    @property
    def in_use(self) -> int:
        """Number of gradients that are or will be in memory, besides the running sum."""
        return len(self._granted) + self._mode.held + self._released - self._folded

    def open(self, ticket: Any, place: _Place, step: int) -> list[LockGroupEffect]:
        """Announces a push. `settle` grants the permit.

        Args:
            ticket: identifies the call.
            place: place of the worker.
            step: step of the push.

        Returns:
            Answers to this call, or to an earlier call of the same push.
        """
        if not self._mode.wants(place, step):
            return [GrantPermit(ticket, wanted=False)]
        if self.limits is None:
            return [GrantPermit(ticket, wanted=True)]
        if place in self._granted:  # repeated: the earlier call is broken, or the worker replaces what it has staged
            self._granted[place] = ticket
            return [GrantPermit(ticket, wanted=True)]
        earlier = self._waiting.get(place)
        self._waiting[place] = ticket, step
        if earlier is None:
            heapq.heappush(self._order, place)
            return []
        return [RefusePermit(earlier[0], errors.Cancelled("the push was repeated, so this call of it was abandoned"))]

    def withdraw(self, ticket: Any, *, staged: bool) -> None:
        """Ends a call that failed, or whose caller is gone.

        Args:
            ticket: identifies the call.
            staged: whether the worker has a staged gradient, which keeps its permit.
        """
        for place, (waits, _) in self._waiting.items():
            if waits == ticket:
                del self._waiting[place]
                self._mode.reopen(self._clocks, place)
                return
        for place, granted in self._granted.items():
            if granted == ticket:
                if not staged:
                    del self._granted[place]
                    self._mode.reopen(self._clocks, place)
                return

    def committed(self, place: _Place) -> None:
        """Ends the permit of a committed push. From now on, the mode counts its gradient, if it is not dropped."""
        self._granted.pop(place, None)

    def released(self, count: int) -> None:
        """Counts contributions that may be folded now."""
        self._released += count

    def folded(self, count: int | None = None) -> None:
        """Frees the permits of folded contributions.

        Args:
            count: number of contributions that were ever folded; None means all that were released.
        """
        self._folded = self._released if count is None else max(self._folded, count)

    def refuse(self, place: _Place, error: errors.ShoalError) -> list[LockGroupEffect]:
        """Refuses a worker's push if it waits."""
        waits = self._waiting.pop(place, None)
        return [RefusePermit(waits[0], error)] if waits else []

    def drop(self, place: _Place) -> None:
        """Ends the permit of a worker that is not admitted any more."""
        self._granted.pop(place, None)
        self._mode.reopen(self._clocks, place)

    def clear(self) -> list[Any]:
        """Removes all pushes that wait, and returns their tickets."""
        tickets = [ticket for ticket, _ in self._waiting.values()]
        self._waiting, self._order = {}, []
        return tickets

    def forget_callers(self) -> None:
        """Drops the pushes that wait, and forgets the calls of those with a permit: they called another server."""
        waiting = list(self._waiting)
        self.clear()
        for place in waiting:
            self._mode.reopen(self._clocks, place)
        self._granted = dict.fromkeys(self._granted)

    def write_to(self, message: pb.PermitState, ticket_of: Callable[[Any], int]) -> None:
        """Writes the permits into an empty message, for a copy.

        Args:
            message: the message.
            ticket_of: returns the number of a ticket, from 1.
        """
        message.released, message.folded = self._released, self._folded
        for place, (ticket, step) in self._waiting.items():
            message.waiting.add(place=_message_of(place), ticket=ticket_of(ticket), step=step)
        for place, ticket in self._granted.items():
            message.granted.add(place=_message_of(place), ticket=0 if ticket is None else ticket_of(ticket))

    def restore(self, message: pb.PermitState) -> None:
        """Restores the permits that another object has written. Tickets are then numbers."""
        self._released, self._folded = message.released, message.folded
        self._waiting = {_place_of(push.place): (push.ticket, push.step) for push in message.waiting}
        self._order = sorted(self._waiting)
        self._granted = {_place_of(push.place): push.ticket or None for push in message.granted}

    @property
    def announced(self) -> set[_Place]:
        """Places of the workers whose pushes were opened and are not committed."""
        return self._waiting.keys() | self._granted.keys()

    def settle(self) -> list[LockGroupEffect]:
        """Answers the pushes that need not wait any longer. Called after each event."""
        if not self._waiting:
            return []
        some, (_, step) = next(iter(self._waiting.items()))
        if not self._mode.wants(some, step):  # the step has closed, or is about to: this concerns all
            return [GrantPermit(ticket, wanted=False) for ticket in self.clear()]
        return [GrantPermit(ticket, wanted=True) for ticket in self._grants()]

    def _grants(self) -> Iterator[Any]:
        limits = self.limits
        assert limits is not None, "pushes wait, but need no permit"
        first, small = self._mode.first(self._clocks), len(self._clocks) <= limits.workers
        most = limits.workers if small else limits.permits
        # What is being folded ends by itself. All else waits for the first worker, which must not wait for it.
        if first is not None and first in self._waiting and (self.in_use < most or self._released == self._folded):
            yield self._grant(first)
        if first is not None and first in self._granted:  # it may have come out of order
            self._mode.reserve(first)
        # Of three, two are kept for the ranks that are next: one is sent while the one before is folded.
        kept = 0 if first in self._granted else 1 if small else 2
        room = most - kept
        while self._waiting and self.in_use < room:
            place = heapq.heappop(self._order)
            if place in self._waiting:
                yield self._grant(place)

    def _grant(self, place: _Place) -> Any:
        self._granted[place], _ = self._waiting.pop(place)
        return self._granted[place]

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken. Tests call it after every event."""
        assert not self._waiting.keys() & self._granted.keys()
        assert self._waiting.keys() <= set(self._order)
        assert 0 <= self._folded <= self._released
        lives = {clock.place for clock in self._clocks.values()}
        assert self._granted.keys() <= lives
        if self.limits is None:
            return
        assert self.in_use <= max(self.limits.workers, self.limits.permits), "more gradients than permits"
        first = self._mode.first(self._clocks)
        assert first not in self._waiting or self._released > self._folded, "the first worker waits"


def _message_of(place: _Place) -> pb.Place:
    return pb.Place(rank=place[0], incarnation=place[1])


def _place_of(message: pb.Place) -> _Place:
    return message.rank, message.incarnation


__all__ = ["Permits"]
