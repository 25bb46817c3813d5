"""Pulls of a lock group: which of them are answered now, and which wait.

A worker's pull waits until the mode allows its step. A reader's pull waits only while the mode waits for the norm of a
gradient. `WaitingPulls` keeps the pulls by the step that they wait for, so no event has to look at all of them. All
classes are pure. With W workers, the amortised cost of an operation is O(log W) at most.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shoal import errors
from shoal._limits import catalogue
from shoal_server.shards.machine.clocks import SLACK, Clocks
from shoal_server.shards.machine.events import AnswerPulls, LockGroupEffect, PullRequested, RefusePull
from shoal_server.shards.machine.mode import Mode

# Steps ahead for which a pull may ask: values of the next step, while the worker computes this one.
MAX_AHEAD = 1
# Most pulls that wait at one shard. A waiting pull takes memory, not a thread.
MAX_WAITING_PULLS = catalogue.MAX_WAITING_PULLS.default


@dataclass(frozen=True, slots=True)
class WaitingPull:
    """A pull that waits.

    Attributes:
        worker: name of the worker.
        step: the step that the values are for.
    """

    worker: str
    step: int


class WaitingPulls:
    """Pulls by ticket, with an order by the step that they wait for."""

    def __init__(self) -> None:
        self._by_ticket: dict[Any, WaitingPull] = {}
        self._at: dict[int, dict[Any, WaitingPull]] = {}  # step -> its pulls, oldest first; none is empty
        self._order: list[int] = []  # heap of at least the keys of _at

    def __len__(self) -> int:
        return len(self._by_ticket)

    def items(self) -> Iterator[tuple[Any, WaitingPull]]:
        """Yields tickets and pulls, in the order in which they came."""
        yield from self._by_ticket.items()

    def add(self, ticket: Any, worker: str, step: int) -> None:
        """Adds a pull.

        Args:
            ticket: identifies the pull.
            worker: name of the worker.
            step: the step that the values are for.
        """
        pull = self._by_ticket[ticket] = WaitingPull(worker, step)
        if step not in self._at:
            self._at[step] = {}
            heapq.heappush(self._order, step)
            if len(self._order) > 2 * len(self._at) + SLACK:
                self._order = sorted(self._at)
        self._at[step][ticket] = pull

    def remove(self, ticket: Any) -> None:
        """Removes a pull. Has no effect if the pull does not wait."""
        pull = self._by_ticket.pop(ticket, None)
        if pull is not None:
            pulls = self._at[pull.step]
            del pulls[ticket]
            if not pulls:
                del self._at[pull.step]

    def pop_up_to(self, step: int) -> list[tuple[int, Mapping[Any, WaitingPull]]]:
        """Removes the pulls that wait for at most this step.

        Returns:
            Each step with its pulls by ticket: lowest step first, and oldest pull first.
        """
        order, found = self._order, list[tuple[int, Mapping[Any, WaitingPull]]]()
        while order and order[0] <= step:
            reached = heapq.heappop(order)
            pulls = self._at.pop(reached, None)  # None: its pulls were removed
            if pulls:
                found.append((reached, pulls))
                for ticket in pulls:
                    del self._by_ticket[ticket]
        return found

    def clear(self) -> list[Any]:
        """Removes all pulls and returns their tickets."""
        tickets = list(self._by_ticket)
        self._by_ticket, self._at, self._order = {}, {}, []
        return tickets


class Pulls:
    """The pulls of one lock group.

    Args:
        name: name for messages: that of the job.
        mode: the consistency mode of the group.
        clocks: the admitted workers.
        on_admission: called with the workers whose pulls are let through, and the step of these pulls.

    Attributes:
        readers: tickets and steps of the readers that wait for a norm. For reading only.
    """

    def __init__(
        self, name: str, mode: Mode, clocks: Clocks, on_admission: Callable[[Iterable[str], int], object]
    ) -> None:
        self._name, self._mode, self._clocks, self._on_admission = name, mode, clocks, on_admission
        self._of_workers = WaitingPulls()
        self.readers: dict[Any, int] = {}

    def __len__(self) -> int:
        """Returns the number of waiting pulls."""
        return len(self._of_workers) + len(self.readers)

    def read(self, ticket: Any, step: int) -> list[LockGroupEffect]:
        """Answers the pull of a reader, lets it wait, or refuses it if too many pulls wait."""
        if not self._mode.awaits_norm:
            return [AnswerPulls((ticket,), step)]
        if refused := self._refused(ticket):
            return [refused]
        self.readers[ticket] = step  # the answers to all pushes of the step are given, so readers get its update
        return []

    def check_ahead(self, ahead: int) -> None:
        """Checks for how many steps ahead a worker pulls.

        Raises:
            BadRequest: it is more than MAX_AHEAD.
        """
        if ahead > MAX_AHEAD:
            raise errors.BadRequest(f"{self._name}: a pull is {ahead} steps ahead; the maximum is {MAX_AHEAD}")

    def request(self, event: PullRequested) -> list[LockGroupEffect]:
        """Answers the pull of an admitted worker, lets it wait, or refuses it if too many pulls wait."""
        step = event.step + event.ahead
        if self._mode.may_pull(step, self._clocks):
            return [self._admit(step, {event.ticket: WaitingPull(event.worker, step)})]
        if refused := self._refused(event.ticket):
            return [refused]
        self._of_workers.add(event.ticket, event.worker, step)
        return []

    def abandon(self, ticket: Any) -> None:
        """Removes a pull. Has no effect if the pull does not wait."""
        self._of_workers.remove(ticket)
        self.readers.pop(ticket, None)

    def settle(self) -> list[LockGroupEffect]:
        """Answers the workers' pulls that may now pass."""
        if not len(self._of_workers):
            return []
        ready = self._of_workers.pop_up_to(self._mode.limit(self._clocks))
        return [self._admit(step, pulls) for step, pulls in ready]

    def answer_readers(self) -> list[LockGroupEffect]:
        """Answers the readers that have waited for a norm."""
        readers, self.readers = self.readers, {}
        return [AnswerPulls((ticket,), step) for ticket, step in readers.items()]

    def refuse(self, worker: str, error: errors.ShoalError) -> list[LockGroupEffect]:
        """Refuses the pulls of one worker."""
        tickets = [ticket for ticket, pull in self._of_workers.items() if pull.worker == worker]
        for ticket in tickets:
            self._of_workers.remove(ticket)
        return [RefusePull(ticket, error) for ticket in tickets]

    def clear(self) -> list[Any]:
        """Removes all pulls and returns their tickets."""
        readers, self.readers = self.readers, {}
        return [*self._of_workers.clear(), *readers]

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        for _, pull in self._of_workers.items():
            assert pull.worker in self._clocks
            assert not self._mode.may_pull(pull.step, self._clocks), "a pull waits that could be answered"
        assert self._mode.awaits_norm or not self.readers

    def _admit(self, step: int, pulls: Mapping[Any, WaitingPull]) -> AnswerPulls:
        # One effect for all: the commit that ends a step may let a thousand pulls through, under the group's lock.
        self._on_admission((pull.worker for pull in pulls.values()), step)
        return AnswerPulls(tuple(pulls), self._mode.next_step(step))

    def _refused(self, ticket: Any) -> RefusePull | None:
        # An effect, not an error, because the pull may have finished steps, and their updates must be applied.
        if (waiting := len(self)) < MAX_WAITING_PULLS:
            return None
        problem = f"{self._name}: {waiting} pulls wait"
        return RefusePull(ticket, catalogue.MAX_WAITING_PULLS.refusal(problem, "try again later"))
