"""Interface of a consistency mode: what a lock group asks it, and what it decides about contributions.

`shoal_server.shards.machine.consistency` has the modes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from shoal import errors
from shoal._wire import Cursor
from shoal.optim import Schedule
from shoal.v1 import replica_pb2 as pb
from shoal_server.shards.machine.clocks import Clocks


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
    squares: float | None = None  # of the whole push, on all servers; None if its worker did not send it
    learning_rate: float | None = None  # of the update; None means that of the job

    @property
    def place(self) -> tuple[int, int]:
        """The place of the contribution in the sums of its step."""
        return self.rank, self.incarnation


def check_rate(rate: float, whose: str) -> None:
    """Raises BadRequest if a learning rate that another process has sent is not finite, or is below 0.

    Args:
        rate: the rate.
        whose: what has it, for the message.
    """
    if not 0 <= rate < math.inf:
        raise errors.BadRequest(f"{whose} has the learning rate {rate}; it must be finite and at least 0")


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
        learning_rate: replaces the optimizer's schedule; None keeps it.
        squares: sum of the squares of the gradient on all servers, for `clip_norm`; None if the shards here are all
            shards of the job.
    """

    contributions: tuple[Contribution, ...]
    learning_rate_scale: float = 1.0
    folded: int = 0
    expected: int = 1
    learning_rate: Schedule | None = None
    squares: float | None = None


@dataclass(frozen=True, slots=True)
class PushDecision:
    """A mode's decision about a push: whether it counts, and which updates follow at once."""

    accepted: bool
    applies: list[Apply] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PermitLimits:
    """The most gradients that a lock group holds in memory, besides the running sum.

    Attributes:
        workers: if there are at most this many workers, each of them has a permit, so that no push waits.
        permits: number of permits if there are more workers.
    """

    workers: int
    permits: int


# The limit of a mode that lets every pull through: above all steps.
NO_LIMIT = 1 << 62


class Mode(ABC):
    """A consistency mode, with the state that it keeps for one lock group."""

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
        """Seals the open step if it is about to close, so that its last contributions can be folded before it closes.

        Returns:
            The contributions that are left to fold; None if the step is not sealed.
        """
        del clocks
        return None

    def folds_done(self) -> bool:
        """Lets a sealed step close at the next `settle`, unless it needs the squares of its mean.

        Returns:
            Whether the squares of the mean on this server are now wanted.
        """
        return False

    @property
    def awaits_norm(self) -> bool:
        """Whether the open step is sealed, and closes only after `norm_known`."""
        return False

    def norm_known(self, squares: float) -> None:  # noqa: B027 - most modes need no norm
        """Lets a sealed step close at the next `settle`.

        Args:
            squares: sum of the squares of the step's mean on all servers.
        """

    # Permits bound the memory of gradients that a step keeps; see `shoal_server.shards.machine.permits`.

    @abstractmethod
    def permit_limits(self, nbytes: int) -> PermitLimits | None:
        """Declares the mode's bound on gradients in memory.

        A mode that needs all contributions to a step at the same time must return at least the number of workers.

        Args:
            nbytes: bytes of one gradient in memory.

        Returns:
            The bound; None means that pushes need no permit. There is then at most one gradient for each worker.
        """

    @property
    def held(self) -> int:
        """Number of contributions that wait to be folded or applied."""
        return 0

    def wants(self, place: tuple[int, int], step: int) -> bool:
        """Returns whether the mode would accept a gradient of this worker and step. Once False, it stays False."""
        del place, step
        return True

    def first(self, clocks: Clocks) -> tuple[int, int] | None:
        """Returns the place of the next contribution to fold; None if there is none, or if the mode has no order."""
        del clocks
        return None

    def reserve(self, place: tuple[int, int]) -> None:  # noqa: B027 - most modes have no order
        """Records that the worker at this place has the permit of `first`.

        No worker may then join the open step at an earlier place.
        """

    def decide(self, clocks: Clocks, announced: Collection[tuple[int, int]]) -> bool:
        """Decides which workers contribute to the open step, if enough have announced a gradient.

        Args:
            clocks: the admitted workers.
            announced: places of the workers that have announced a gradient and not committed it.

        Returns:
            Whether workers were excluded, so that more may be folded.
        """
        del clocks, announced
        return False

    def reopen(self, clocks: Clocks, place: tuple[int, int]) -> None:  # noqa: B027 - as above
        """Takes a decision of `decide` back as far as possible.

        The worker at this place is lost, or has failed to send its gradient.
        """

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

    # Copies of a lock group; see `shoal_server.shards.machine.group_record`.

    @property
    def is_empty(self) -> bool:
        """Whether the open step has no contribution."""
        return True

    def write_to(self, message: pb.GroupState) -> None:  # noqa: B027 - most modes keep nothing
        """Writes the state of an empty mode into a message."""

    def restore(self, message: pb.GroupState) -> None:  # noqa: B027 - as above
        """Restores the state that another mode of this kind has written. This one is new."""
