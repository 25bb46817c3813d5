"""How a shard enforces each consistency mode: pure bookkeeping over clocks, without values, locks or threads.

A mode answers two questions. May this worker pull at this step? And, of what was pushed, what is to be applied now?
`shoal_server.shards.state` asks them; `shoal.consistency` is what users choose by.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal import consistency
from shoal._wire import Cursor


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one push brings to a shard."""

    rank: int  # place in sums, so that additions happen in the same order in each run
    incarnation: int  # of its worker: a rank may be taken over within a step
    step: int
    weight: float  # in a step's mean; 0 passes the step by
    version: int  # of the shard when the worker pulled
    payload: Any  # the gradient, which no state machine looks into; None when weight is 0
    worker: str = ""
    cursor: Cursor | None = None


@dataclass(slots=True)
class WorkerClock:
    """What a shard knows of one admitted worker."""

    incarnation: int
    rank: int
    steps: int  # finished, or passed by; never falls


@dataclass(frozen=True, slots=True)
class Apply:
    """One update of the shard: the weighted mean of the contributions, in order of rank."""

    contributions: tuple[Contribution, ...]
    learning_rate_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class PushDecision:
    """What a mode makes of a push."""

    accepted: bool
    applies: list[Apply] = field(default_factory=list)


Clocks = Mapping[str, WorkerClock]


def slowest(clocks: Clocks, default: int) -> int:
    """Steps finished by the slowest admitted worker; `default` if there is none."""
    return min((clock.steps for clock in clocks.values()), default=default)


class Mode(ABC):
    """One shard's enforcement of one consistency mode."""

    @abstractmethod
    def may_pull(self, step: int, clocks: Clocks) -> bool:
        """Whether a worker that has finished `step` steps may have the values now."""

    @abstractmethod
    def take(self, contribution: Contribution, staleness: int) -> PushDecision:
        """Takes in a push; the pusher's clock is set afterwards, by the caller."""

    def settle(self, clocks: Clocks) -> list[Apply]:
        """What is to be applied now that clocks moved or workers came and went."""
        del clocks
        return []

    @abstractmethod
    def next_step(self, steps: int) -> int:
        """The step to take for a worker that has finished `steps`."""

    def resume(self, step: int) -> None:
        """Goes on at a step, before anybody is admitted."""
        del step

    @abstractmethod
    def entry_step(self, clocks: Clocks, furthest: int) -> int:
        """The step at which a newcomer joins; `furthest` is the most steps any worker ever finished here."""


class AsynchronousMode(Mode):
    """Applies each push when it comes; no pull waits."""

    def __init__(self, *, scale_by_staleness: bool) -> None:
        self._scale_by_staleness = scale_by_staleness

    def may_pull(self, step: int, clocks: Clocks) -> bool:
        del step, clocks
        return True

    def take(self, contribution: Contribution, staleness: int) -> PushDecision:
        if contribution.payload is None:
            return PushDecision(accepted=True)
        scale = 1.0 / max(1, staleness) if self._scale_by_staleness else 1.0
        return PushDecision(accepted=True, applies=[Apply((contribution,), scale)])

    def next_step(self, steps: int) -> int:
        return steps

    def entry_step(self, clocks: Clocks, furthest: int) -> int:
        # Among the slowest: a newcomer behind them would make a bounded mode's others wait for its catching up.
        return slowest(clocks, furthest)


class BoundedStalenessMode(AsynchronousMode):
    """As asynchronous, but a pull waits until the slowest worker is within `bound` steps (Ho et al., NIPS 2013)."""

    def __init__(self, bound: int) -> None:
        super().__init__(scale_by_staleness=False)
        self._bound = bound

    def may_pull(self, step: int, clocks: Clocks) -> bool:
        return step - slowest(clocks, step) <= self._bound


class SynchronousMode(Mode):
    """Collects each step's contributions and applies their mean once the step closes.

    The open step closes when something was contributed and no more admitted workers still owe it (have not finished
    it) than there are backups, or when nobody owes it. A worker that died or is through uses up one of the backups, so
    a step is always that of all but `backup_workers`, or of all that are left. What comes for a closed step is dropped.
    """

    def __init__(self, backup_workers: int) -> None:
        self._backup_workers = backup_workers
        self._crew = 0  # the most workers that were admitted at once
        self._open_step = 0
        self._held: dict[tuple[int, int], Contribution] = {}  # to the open step, by rank and incarnation

    def may_pull(self, step: int, clocks: Clocks) -> bool:
        del clocks
        return step <= self._open_step

    def take(self, contribution: Contribution, staleness: int) -> PushDecision:
        del staleness
        if contribution.step < self._open_step:
            return PushDecision(accepted=False)
        if contribution.payload is not None:
            self._held[contribution.rank, contribution.incarnation] = contribution
        return PushDecision(accepted=True)

    def settle(self, clocks: Clocks) -> list[Apply]:
        self._crew = max(self._crew, len(clocks))
        applies = []
        while self._closes(clocks):
            if self._held:
                applies.append(Apply(tuple(self._held[life] for life in sorted(self._held))))
                self._held = {}
                self._open_step += 1
            else:  # everybody has passed it by, and perhaps more
                self._open_step = slowest(clocks, self._open_step)
        return applies

    def _closes(self, clocks: Clocks) -> bool:
        owing = sum(clock.steps <= self._open_step for clock in clocks.values())
        if self._held:
            return owing <= max(0, self._backup_workers - (self._crew - len(clocks)))
        return bool(clocks) and owing == 0

    def next_step(self, steps: int) -> int:
        return max(steps, self._open_step)

    def resume(self, step: int) -> None:
        self._open_step = step

    def entry_step(self, clocks: Clocks, furthest: int) -> int:
        del clocks, furthest
        return self._open_step


def mode_for(spec: consistency.Consistency) -> Mode:
    """A fresh enforcement of what a job asks for."""
    match spec:
        case consistency.Synchronous(backup_workers):
            return SynchronousMode(backup_workers)
        case consistency.Asynchronous(scale_by_staleness):
            return AsynchronousMode(scale_by_staleness=scale_by_staleness)
        case consistency.BoundedStaleness(bound):
            return BoundedStalenessMode(bound)
    raise TypeError(f"no enforcement for {spec!r}")
