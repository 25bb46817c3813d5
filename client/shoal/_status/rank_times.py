"""Times of the ranks of a group by phase, and the detection of stragglers among ranks, as plain values."""

from dataclasses import astuple, dataclass
from statistics import median

from shoal.v1 import group_pb2

# The straggler waits for less than the others by this share of the time, in so many calls or more.
_NOTICEABLE, _FEWEST = 0.05, 5


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
    """

    seconds: float = 0.0
    steps: int = 0
    calls: int = 0
    local_reduce: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0

    def since(self, earlier: "RankTimes") -> "RankTimes":
        """Returns what was added since earlier times of the same rank."""
        return RankTimes(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))

    def to_proto(self) -> group_pb2.RankTimes:
        """Returns the message that carries the times."""
        return group_pb2.RankTimes(
            seconds=self.seconds,
            steps=self.steps,
            calls=self.calls,
            local_reduce=self.local_reduce,
            wait=self.wait,
            transfer=self.transfer,
        )

    @classmethod
    def from_proto(cls, message: group_pb2.RankTimes) -> "RankTimes":
        """Returns the times that a message carries."""
        return cls(message.seconds, message.steps, message.calls, message.local_reduce, message.wait, message.transfer)


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

    def __str__(self) -> str:
        rows = ["rank   steps   calls   local reduce       wait   transfer   (seconds of the last minute)"]
        rows += [
            f"{rank:4}{it.steps:8}{it.calls:8}{it.local_reduce:15.3f}{it.wait:11.3f}{it.transfer:11.3f}"
            for rank, it in enumerate(self.ranks)
        ]
        straggler = self.straggler()
        return "\n".join([*rows, *([str(straggler)] if straggler else [])])


__all__ = ["GroupTimings", "RankTimes", "StragglerRank"]
