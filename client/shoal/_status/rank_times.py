"""Times of the ranks of a group by phase, and the detection of stragglers among ranks, as plain values."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean, median

from shoal.v1 import group_pb2

# The straggler waits for less than the others by this share of the time, in so many calls or more.
_NOTICEABLE, _FEWEST = 0.05, 5


def ideal_bubble(stages: int, micro_batches: int) -> float:
    """Returns the share of a training step in which each of equal stages waits, in all schedules.

    Args:
        stages: number of stages.
        micro_batches: number of micro-batches of the step.
    """
    return (stages - 1) / (micro_batches + stages - 1)


@dataclass(frozen=True, slots=True)
class Bubble:
    """The share of the time of training steps in which the stages of a pipeline wait, as a mean of the stages.

    Attributes:
        measured: the measured share. None if no step has ended in that time.
        stages: number of stages.
        micro_batches: number of micro-batches of a step.
    """

    measured: float | None
    stages: int
    micro_batches: int

    @property
    def ideal(self) -> float:
        """The share if all stages took equally long, and messages took no time."""
        return ideal_bubble(self.stages, self.micro_batches)

    def __str__(self) -> str:
        count, measured = self.micro_batches, "-" if self.measured is None else f"{self.measured:.3f}"
        batches, more = "micro-batches" if count > 1 else "micro-batch", ideal_bubble(self.stages, 2 * count)
        return (
            f"bubble {measured}; equal stages would have {self.ideal:.3f} with {count} {batches}, and {more:.3f} with "
            f"{2 * count}"
        )


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The times of a stage of a pipeline in the training steps that have ended, without updates of variables.

    Attributes:
        stage: its number.
        stages: number of stages of the pipeline.
        micro_batches: number of micro-batches of a step.
        seconds: seconds of the forward and backward passes of all micro-batches, including the time between them.
        wait: seconds of these in which the stage did not compute: it waited for other stages, or passed messages.
    """

    stage: int
    stages: int
    micro_batches: int
    seconds: float = 0.0
    wait: float = 0.0

    @property
    def bubble(self) -> float | None:
        """The share of the time in which the stage waited. None if no step has ended."""
        return self.wait / self.seconds if self.seconds > 0 else None

    def later(self, seconds: float, wait: float) -> "StageTimes":
        """Returns the times after a step.

        Args:
            seconds: duration of its passes.
            wait: seconds of these in which the stage did not compute.
        """
        return replace(self, seconds=self.seconds + seconds, wait=self.wait + wait)

    def since(self, earlier: "StageTimes | None") -> "StageTimes":
        """Returns what was added since earlier times of the same stage."""
        return self.later(-earlier.seconds, -earlier.wait) if earlier else self

    def to_proto(self) -> group_pb2.StageTimes:
        """Returns the message that carries the times."""
        return group_pb2.StageTimes(
            stage=self.stage,
            stages=self.stages,
            micro_batches=self.micro_batches,
            seconds=self.seconds,
            wait=self.wait,
        )

    @classmethod
    def from_proto(cls, message: group_pb2.StageTimes) -> "StageTimes":
        """Returns the times that a message carries."""
        return cls(message.stage, message.stages, message.micro_batches, message.seconds, message.wait)


@dataclass(slots=True)
class RankTimes:
    """The times of one rank. They overlap with its computation if it reduces gradients during the backward pass.

    Attributes:
        seconds: seconds that passed.
        steps: steps of training in which it has applied gradients.
        calls: collective calls, and messages that other stages of a pipeline have passed to it.
        local_reduce: seconds in which the replicas of its process joined their gradients.
        wait: seconds in which it waited until other ranks made the same call, or passed a message.
        transfer: seconds of the rest of the calls: moving and adding data.
        stage: the times of the stage that it computes. None if it has trained no stage of a pipeline.
    """

    seconds: float = 0.0
    steps: int = 0
    calls: int = 0
    local_reduce: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0
    stage: StageTimes | None = None

    def since(self, earlier: "RankTimes") -> "RankTimes":
        """Returns what was added since earlier times of the same rank."""
        return RankTimes(
            self.seconds - earlier.seconds,
            self.steps - earlier.steps,
            self.calls - earlier.calls,
            self.local_reduce - earlier.local_reduce,
            self.wait - earlier.wait,
            self.transfer - earlier.transfer,
            self.stage.since(earlier.stage) if self.stage else None,
        )

    def to_proto(self) -> group_pb2.RankTimes:
        """Returns the message that carries the times."""
        return group_pb2.RankTimes(
            seconds=self.seconds,
            steps=self.steps,
            calls=self.calls,
            local_reduce=self.local_reduce,
            wait=self.wait,
            transfer=self.transfer,
            stage=self.stage.to_proto() if self.stage else None,
        )

    @classmethod
    def from_proto(cls, message: group_pb2.RankTimes) -> "RankTimes":
        """Returns the times that a message carries."""
        return cls(
            message.seconds,
            message.steps,
            message.calls,
            message.local_reduce,
            message.wait,
            message.transfer,
            StageTimes.from_proto(message.stage) if message.HasField("stage") else None,
        )


def bubble_of(ranks: Iterable[RankTimes]) -> Bubble | None:
    """Returns the bubble of the pipeline that ranks compute. None if they compute no stages.

    Args:
        ranks: the times of the ranks, of one or several replicas of the pipeline.
    """
    stages = [it.stage for it in ranks if it.stage]
    if not stages:
        return None
    shares = [it.bubble for it in stages if it.bubble is not None]
    return Bubble(fmean(shares) if shares else None, stages[0].stages, stages[0].micro_batches)


@dataclass(frozen=True, slots=True)
class StragglerRank:
    """The rank that the others wait for.

    Attributes:
        rank: its number.
        seconds: by how much longer the others wait, for each call, as a median.
    """

    rank: int
    seconds: float

    def to_proto(self) -> group_pb2.StragglerRank:
        """Returns the message that carries the rank."""
        return group_pb2.StragglerRank(rank=self.rank, seconds=self.seconds)

    @classmethod
    def from_proto(cls, message: group_pb2.StragglerRank) -> "StragglerRank":
        """Returns the rank that a message carries."""
        return cls(message.rank, message.seconds)

    def __str__(self) -> str:
        return f"rank {self.rank} is a straggler: the others wait {1e3 * self.seconds:.3g} ms for it in each call"


@dataclass(frozen=True, slots=True)
class GroupTimings:
    """The times of all ranks of a group over the last minute. `str` makes a table.

    Attributes:
        ranks: the times, by rank.
    """

    ranks: tuple[RankTimes, ...] = ()

    def straggler(self) -> StragglerRank | None:
        """Returns the straggler, or None.

        The straggler is the rank that waits least. Its wait is shorter than the others' median by more than 5% of the
        time.
        """
        if len(self.ranks) < 2 or min(it.calls for it in self.ranks) < _FEWEST:
            return None
        rank = min(range(len(self.ranks)), key=lambda number: self.ranks[number].wait)
        its = self.ranks[rank]
        longer = median(it.wait for number, it in enumerate(self.ranks) if number != rank) - its.wait
        return StragglerRank(rank, longer / its.calls) if longer > _NOTICEABLE * its.seconds else None

    def bubble(self) -> Bubble | None:
        """Returns the bubble of the pipeline whose stages the ranks compute. None if they compute no stages."""
        return bubble_of(self.ranks)

    def __str__(self) -> str:
        rows = ["rank   steps   calls   local reduce       wait   transfer   (seconds of the last minute)"]
        rows += [
            f"{rank:4}{it.steps:8}{it.calls:8}{it.local_reduce:15.3f}{it.wait:11.3f}{it.transfer:11.3f}"
            for rank, it in enumerate(self.ranks)
        ]
        return "\n".join([*rows, *(str(it) for it in (self.straggler(), self.bubble()) if it)])


__all__ = ["Bubble", "GroupTimings", "RankTimes", "StageTimes", "StragglerRank", "bubble_of", "ideal_bubble"]
