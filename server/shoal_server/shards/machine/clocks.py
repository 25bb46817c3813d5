"""Clocks of a lock group's workers, ordered by step.

`Clocks` counts the workers at each step, so no event has to look at all workers. It is pure. With W workers, the
amortised cost of an operation is O(log W) at most.
"""

import heapq
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass

from shoal import errors
from shoal._wire.limits import MAX_LEAD, MAX_STEP

# Outdated entries of a heap are removed when there are this many more of them than of current entries.
SLACK = 64


def check_step(name: str, step: int, furthest: int = MAX_STEP) -> None:
    """Checks a step or version of a request. Called before anything changes.

    Args:
        name: name of the lock group, for the message.
        step: the step; the next one has to be below the limit, too.
        furthest: the largest number of steps that a worker of the group has finished.

    Raises:
        BadRequest: the step is out of range, or too far above `furthest`.
    """
    if not 0 <= step < MAX_STEP - 1:
        problem, limit = "is out of range", f"MAX_STEP - 1 is {MAX_STEP - 1}"
    elif step > furthest + MAX_LEAD:
        problem, limit = f"is {step - furthest} steps ahead of the furthest worker", f"MAX_LEAD is {MAX_LEAD}"
    else:
        return
    raise errors.BadRequest(f"{name}: step {step} {problem}; the limit {limit}", step=step, limit=limit.split()[0])


@dataclass(slots=True)
class WorkerClock:
    """A group's record of one admitted worker."""

    incarnation: int
    rank: int
    steps: int  # finished or skipped; never falls, and only `Clocks.advance` changes it

    @property
    def place(self) -> tuple[int, int]:
        """The place of the worker's contributions in the sums of a step."""
        return self.rank, self.incarnation


class Clocks(Mapping[str, WorkerClock]):
    """The clocks of the admitted workers by name, and the number of workers that have finished each number of steps."""

    def __init__(self) -> None:
        self._by_worker: dict[str, WorkerClock] = {}
        self._at: dict[int, int] = {}  # steps -> workers that have finished exactly as many; none is 0
        self._order: list[int] = []  # heap of at least the keys of _at
        self._mark = 0  # of the last `count_up_to`
        self._up_to_mark = 0  # workers that have finished at most _mark steps
        self._first_mark = -1  # of the last `first_up_to`; -1 before the first one
        # Heap of rank, incarnation and name, at least of all workers that have finished at most _first_mark steps.
        self._first: list[tuple[int, int, str]] = []

    def __getitem__(self, worker: str) -> WorkerClock:
        return self._by_worker[worker]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_worker)

    def __len__(self) -> int:
        return len(self._by_worker)

    # As in a dict: the methods of Mapping raise and catch a KeyError for each missing worker.

    def __contains__(self, worker: object) -> bool:
        return worker in self._by_worker

    def get(self, worker: str, default: None = None) -> WorkerClock | None:  # type: ignore[override]
        """Returns a worker's clock, or None if the worker is not admitted."""
        return self._by_worker.get(worker, default)

    def admit(self, worker: str, clock: WorkerClock) -> None:
        """Adds a worker that is not there yet."""
        assert worker not in self._by_worker
        self._by_worker[worker] = clock
        self._add(clock.steps)
        if clock.steps <= self._first_mark:
            heapq.heappush(self._first, (clock.rank, clock.incarnation, worker))

    def release(self, worker: str) -> None:
        """Removes a worker."""
        self._remove(self._by_worker.pop(worker).steps)

    def advance(self, clock: WorkerClock, steps: int) -> None:
        """Sets the steps that an admitted worker has finished, if they are more than before."""
        if steps > clock.steps:
            self._remove(clock.steps)
            clock.steps = steps
            self._add(steps)

    def slowest(self, default: int) -> int:
        """Returns the steps finished by the slowest worker; `default` if there is none."""
        order, at = self._order, self._at
        while order and order[0] not in at:
            heapq.heappop(order)
        return order[0] if order else default

    def count_up_to(self, steps: int) -> int:
        """Returns the number of workers that have finished at most `steps` steps.

        A call is cheap if `steps` is close to that of the call before.
        """
        low, high = sorted((self._mark, steps))
        if high - low <= len(self._at):
            between = sum(self._at.get(step, 0) for step in range(low + 1, high + 1))
        else:
            between = sum(count for step, count in self._at.items() if low < step <= high)
        self._up_to_mark += between if steps > self._mark else -between
        self._mark = steps
        return self._up_to_mark

    def first_up_to(self, steps: int, but: Container[tuple[int, int]] = ()) -> tuple[int, int] | None:
        """Returns rank and incarnation of the first worker, by rank, that has finished at most `steps` steps.

        A call with the same `steps` as the call before is cheap. A call with another number looks at all workers.

        Args:
            steps: largest number of steps.
            but: rank and incarnation of the workers that do not count. If such a worker counts again, call
                `look_again` first.
        """
        if steps != self._first_mark:
            self._first_mark = steps
            self._first = [
                (clock.rank, clock.incarnation, worker)
                for worker, clock in self._by_worker.items()
                if clock.steps <= steps
            ]
            heapq.heapify(self._first)
        while self._first:
            rank, incarnation, worker = self._first[0]
            clock = self._by_worker.get(worker)
            if clock and clock.incarnation == incarnation and clock.steps <= steps and (rank, incarnation) not in but:
                return rank, incarnation
            heapq.heappop(self._first)
        return None

    def look_again(self) -> None:
        """Makes the next `first_up_to` look at all workers."""
        self._first_mark = -1

    def _add(self, steps: int) -> None:
        if steps in self._at:
            self._at[steps] += 1
        else:
            self._at[steps] = 1
            heapq.heappush(self._order, steps)
        if steps <= self._mark:
            self._up_to_mark += 1
        if len(self._order) > 2 * len(self._at) + SLACK:
            self._order = sorted(self._at)

    def _remove(self, steps: int) -> None:
        self._at[steps] -= 1
        if not self._at[steps]:
            del self._at[steps]
        if steps <= self._mark:
            self._up_to_mark -= 1
