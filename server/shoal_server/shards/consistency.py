"""Consistency modes of a shard: pure bookkeeping over worker clocks, without values, locks or threads.

A mode answers two questions: whether a worker may pull at a step, and which pushes are applied now.
`shoal_server.shards.state` asks them. Users choose a mode with `shoal.consistency`.
"""

import heapq
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from shoal import consistency
from shoal._wire import Cursor
from shoal_server.shards.clocks import Clocks


@dataclass(frozen=True, slots=True)
class Contribution:
    """The part of one push that concerns a shard."""

    rank: int  # place in sums, so that additions happen in the same order in each run
    incarnation: int  # the worker's incarnation: a rank may be taken over within a step
    step: int
    weight: float  # weight in a step's mean; 0 if the worker skips the step
    version: int  # version of the shard at the worker's pull
    payload: Any  # the gradient, opaque to the state machine; None when weight is 0
    worker: str = ""
    cursor: Cursor | None = None

    @property
    def place(self) -> tuple[int, int]:
        """Its place in the sums of its step."""
        return self.rank, self.incarnation


@dataclass(frozen=True, slots=True)
class Fold:
    """Adds contributions to the running sum of the open step, in this order, after those of earlier folds.

    It may be carried out at any time before the next `Apply`.

    Attributes:
        contributions: the next contributions in order of rank.
        expected: number of contributions for which the sum makes room.
        seals: whether these are the last ones, so that the step closes after them.
    """

    contributions: tuple[Contribution, ...]
    expected: int
    seals: bool = False


@dataclass(frozen=True, slots=True)
class Apply:
    """One update of the shard: the weighted mean of the contributions, in order of rank.

    Attributes:
        contributions: the contributions.
        learning_rate_scale: factor for the learning rate.
        folded: number of leading contributions that earlier `Fold` effects have named.
        expected: number of contributions for which the sum makes room.
    """

    contributions: tuple[Contribution, ...]
    learning_rate_scale: float = 1.0
    folded: int = 0
    expected: int = 1


@dataclass(frozen=True, slots=True)
class PushDecision:
    """A mode's decision about a push: whether it counts, and which updates follow at once."""

    accepted: bool
    applies: list[Apply] = field(default_factory=list)


# The limit of a mode that lets every pull through: above all steps.
NO_LIMIT = 1 << 62


class Mode(ABC):
    """One shard's enforcement of a consistency mode."""

    @abstractmethod
    def limit(self, clocks: Clocks) -> int:
        """Returns the largest step whose values may be pulled now. It never falls while the same workers are admitted.

        Every commit asks this, so it must not scan the clocks.
        """

    def may_pull(self, step: int, clocks: Clocks) -> bool:
        """Returns whether a worker that has finished `step` steps may have the values now."""
        return step <= self.limit(clocks)

    @abstractmethod
    def take(self, contribution: Contribution, staleness: int) -> PushDecision:
        """Decides about a push. The caller sets the pusher's clock afterwards."""

    def settle(self, clocks: Clocks) -> list[Apply]:
        """Returns the updates that are due after clocks moved, or workers were admitted or released."""
        del clocks
        return []

    def fold(self, clocks: Clocks) -> Fold | None:
        """Returns the contributions that may be added to the running sum now, if there are any."""
        del clocks
        return None

    def seal(self, clocks: Clocks) -> Fold | None:
        """Decides that the open step closes with what it has, so that the rest can be folded before it closes.

        Returns:
            The contributions that are left to fold; None if the step does not close now, or nothing is to be added.
        """
        del clocks
        return None

    def folds_done(self) -> None:  # noqa: B027 - most modes seal no step
        """Lets a sealed step close at the next `settle`."""

    @abstractmethod
    def next_step(self, steps: int) -> int:
        """Returns the next step of a worker that has finished `steps`."""

    def resume(self, step: int) -> None:
        """Continues at a step, before any worker is admitted."""
        del step

    @abstractmethod
    def entry_step(self, clocks: Clocks, furthest: int) -> int:
        """Returns the step at which a new worker joins.

        Args:
            clocks: the admitted workers.
            furthest: largest number of steps that any worker ever finished on this shard.
        """

    def enter(self, worker: str, place: tuple[int, int], clocks: Clocks, furthest: int) -> int:
        """Prepares for the admission of a worker.

        Args:
            worker: name of the worker.
            place: its rank and incarnation.
            clocks: as for `entry_step`.
            furthest: as for `entry_step`.

        Returns:
            The step at which it joins.
        """
        del worker, place
        return self.entry_step(clocks, furthest)


class AsynchronousMode(Mode):
    """Applies each push when it is committed; no pull waits."""

    def __init__(self, *, scale_by_staleness: bool) -> None:
        self._scale_by_staleness = scale_by_staleness

    def limit(self, clocks: Clocks) -> int:
        del clocks
        return NO_LIMIT

    def take(self, contribution: Contribution, staleness: int) -> PushDecision:
        if contribution.payload is None:
            return PushDecision(accepted=True)
        scale = 1.0 / max(1, staleness) if self._scale_by_staleness else 1.0
        return PushDecision(accepted=True, applies=[Apply((contribution,), scale)])

    def next_step(self, steps: int) -> int:
        return steps

    def entry_step(self, clocks: Clocks, furthest: int) -> int:
        # A newcomer joins at the slowest worker's step: behind it, other workers of a bounded mode would have to wait.
        return clocks.slowest(furthest)


class BoundedStalenessMode(AsynchronousMode):
    """Asynchronous, but a pull waits until the slowest worker is within `bound` steps (Ho et al., NIPS 2013)."""

    def __init__(self, bound: int) -> None:
        super().__init__(scale_by_staleness=False)
        self._bound = bound

    def limit(self, clocks: Clocks) -> int:
        return clocks.slowest(NO_LIMIT) + self._bound


class SynchronousMode(Mode):
    """Collects the contributions to each step and applies their mean when the step closes.

    A worker owes the open step until it has finished it. The step closes when no admitted worker owes it. It also
    closes when it has a contribution and at most as many admitted workers owe it as there are backups left. A worker
    that was lost or has finished uses up one backup, so a step takes all workers but `backup_workers`, or all that are
    left. Contributions to a closed step are dropped.

    A step that is about to close can be sealed first: it takes no more contributions, and closes after `folds_done`.

    Contributions are added in order of rank. One is folded, that is, added to the running sum before the step closes,
    as soon as no worker before it owes the step. A worker that joins at a place that the sum has passed begins with
    the next step.
    """

    def __init__(self, backup_workers: int) -> None:
        self._backup_workers = backup_workers
        self._most_admitted = 0  # most workers that were admitted at the same time
        self._open_step = 0
        # Contributions to the open step: those that are folded, in order, and the others by place.
        self._folded: list[Contribution] = []
        self._held: dict[tuple[int, int], Contribution] = {}
        self._order: list[tuple[int, int]] = []  # heap of the keys of _held
        self._sealed = False  # whether the open step takes no more contributions; it then has two or more
        self._complete = False  # whether it is sealed and all are in its sum
        # Names and incarnations of workers that joined during the open step and begin with the next one.
        self._next: list[tuple[str, int]] = []

    def limit(self, clocks: Clocks) -> int:
        del clocks
        return self._open_step

    def take(self, contribution: Contribution, staleness: int) -> PushDecision:
        del staleness
        if contribution.step < self._open_step + self._sealed:
            return PushDecision(accepted=False)
        if contribution.payload is not None:
            if contribution.place not in self._held:
                heapq.heappush(self._order, contribution.place)
            self._held[contribution.place] = contribution
        return PushDecision(accepted=True)

    def settle(self, clocks: Clocks) -> list[Apply]:
        self._most_admitted = max(self._most_admitted, len(clocks))
        applies = []
        while self._closes(clocks):
            if self._held or self._folded:
                rest = (self._held[place] for place in sorted(self._held))
                applies.append(Apply((*self._folded, *rest), folded=len(self._folded), expected=self._room(clocks)))
                self._folded, self._held, self._order, self._next = [], {}, [], []
                self._sealed = self._complete = False
                self._open_step += 1
            else:  # all workers have skipped this step, and perhaps later ones
                self._open_step = clocks.slowest(self._open_step)
        return applies

    def fold(self, clocks: Clocks) -> Fold | None:
        if not self._order:
            return None
        owing, count = clocks.first_up_to(self._open_step), len(self._folded)
        while self._order and (owing is None or self._order[0] < owing):
            self._folded.append(self._held.pop(heapq.heappop(self._order)))
        found = tuple(self._folded[count:])
        return Fold(found, self._room(clocks)) if found else None

    def seal(self, clocks: Clocks) -> Fold | None:
        if len(self._order) < 2 or not self._closes(clocks):  # one is added as fast as the update is applied
            return None
        self._sealed = True
        rest = tuple(self._held[place] for place in sorted(self._held))
        self._folded += rest
        self._held, self._order = {}, []
        return Fold(rest, self._room(clocks), seals=True)

    def folds_done(self) -> None:
        self._complete = self._sealed

    def _room(self, clocks: Clocks) -> int:
        # Not the number of contributions, which is not known when the first are folded: the bits of tiny sums would
        # depend on the order of arrival.
        return max(1, len(clocks))

    def _closes(self, clocks: Clocks) -> bool:
        if self._sealed:
            return self._complete
        owing = clocks.count_up_to(self._open_step)
        if self._held or self._folded:
            return owing <= max(0, self._backup_workers - (self._most_admitted - self._members(clocks)))
        return bool(clocks) and owing == 0

    def _members(self, clocks: Clocks) -> int:
        """Returns the number of workers that are admitted and did not join too late for the open step."""
        if not self._next:
            return len(clocks)
        lives = ((clocks.get(worker), incarnation) for worker, incarnation in self._next)
        return len(clocks) - sum(clock is not None and clock.incarnation == incarnation for clock, incarnation in lives)

    def next_step(self, steps: int) -> int:
        return max(steps, self._open_step)

    def resume(self, step: int) -> None:
        self._open_step = step

    def entry_step(self, clocks: Clocks, furthest: int) -> int:
        del clocks, furthest
        return self._open_step

    def enter(self, worker: str, place: tuple[int, int], clocks: Clocks, furthest: int) -> int:
        del clocks, furthest
        if not self._sealed and (not self._folded or place >= self._folded[-1].place):
            return self._open_step
        self._next.append((worker, place[1]))
        return self._open_step + 1


def mode_for(spec: consistency.Consistency) -> Mode:
    """Returns a new enforcement of the mode that a job asks for."""
    match spec:
        case consistency.Synchronous(backup_workers):
            return SynchronousMode(backup_workers)
        case consistency.Asynchronous(scale_by_staleness):
            return AsynchronousMode(scale_by_staleness=scale_by_staleness)
        case consistency.BoundedStaleness(bound):
            return BoundedStalenessMode(bound)
    raise TypeError(f"no consistency mode for {spec!r}")
