"""Consistency modes of a shard: pure bookkeeping over worker clocks, without values, locks or threads.

A mode answers two questions: whether a worker may pull at a step, and which pushes are applied now.
`shoal_server.shards.state` asks them. Users choose a mode with `shoal.consistency`.
"""

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


@dataclass(frozen=True, slots=True)
class Apply:
    """One update of the shard: the weighted mean of the contributions, in order of rank."""

    contributions: tuple[Contribution, ...]
    learning_rate_scale: float = 1.0


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
    """

    def __init__(self, backup_workers: int) -> None:
        self._backup_workers = backup_workers
        self._most_admitted = 0  # most workers that were admitted at the same time
        self._open_step = 0
        self._held: dict[tuple[int, int], Contribution] = {}  # contributions to the open step, by rank and incarnation

    def limit(self, clocks: Clocks) -> int:
        del clocks
        return self._open_step

    def take(self, contribution: Contribution, staleness: int) -> PushDecision:
        del staleness
        if contribution.step < self._open_step:
            return PushDecision(accepted=False)
        if contribution.payload is not None:
            self._held[contribution.rank, contribution.incarnation] = contribution
        return PushDecision(accepted=True)

    def settle(self, clocks: Clocks) -> list[Apply]:
        self._most_admitted = max(self._most_admitted, len(clocks))
        applies = []
        while self._closes(clocks):
            if self._held:
                applies.append(Apply(tuple(self._held[life] for life in sorted(self._held))))
                self._held = {}
                self._open_step += 1
            else:  # all workers have skipped this step, and perhaps later ones
                self._open_step = clocks.slowest(self._open_step)
        return applies

    def _closes(self, clocks: Clocks) -> bool:
        owing = clocks.count_up_to(self._open_step)
        if self._held:
            return owing <= max(0, self._backup_workers - (self._most_admitted - len(clocks)))
        return bool(clocks) and owing == 0

    def next_step(self, steps: int) -> int:
        return max(steps, self._open_step)

    def resume(self, step: int) -> None:
        self._open_step = step

    def entry_step(self, clocks: Clocks, furthest: int) -> int:
        del clocks, furthest
        return self._open_step


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
