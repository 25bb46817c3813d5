"""The status of elastic groups, as plain values."""

from dataclasses import dataclass

from shoal._status.rank_times import Bubble, RankTimes, StragglerRank, bubble_of
from shoal.v1 import group_pb2


@dataclass(frozen=True, slots=True)
class RankStatus:
    """A rank of an elastic group.

    Attributes:
        rank: its number.
        address: host:port at which it waits for the other ranks.
        times: its times over the last minute, as its last heartbeat has told them.
    """

    rank: int
    address: str
    times: RankTimes

    def to_proto(self) -> group_pb2.RankStatus:
        """Returns the message that carries the rank."""
        return group_pb2.RankStatus(rank=self.rank, address=self.address, times=self.times.to_proto())

    @classmethod
    def from_proto(cls, message: group_pb2.RankStatus) -> "RankStatus":
        """Returns the rank that a message carries."""
        return cls(message.rank, message.address, RankTimes.from_proto(message.times))


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The status of an elastic group.

    Attributes:
        name: name of the group.
        submitter: the user who has made it; "" if that is not known.
        generation: number of its last generation; 0 before the first one.
        size: number of ranks of that generation that have not left it.
        ranks: number of ranks of the first generation, and the most of a later one.
        min_ranks: the fewest ranks of a later generation.
        waits_for: what the next generation waits for. "" while the last one goes on.
        straggler: the rank that the others wait for, or None.
        members: the ranks of the last generation that have not left it, in order. Empty in the list of `Client.groups`.
    """

    name: str
    submitter: str = ""
    generation: int = 0
    size: int = 0
    ranks: int = 1
    min_ranks: int = 1
    waits_for: str = ""
    straggler: StragglerRank | None = None
    members: tuple[RankStatus, ...] = ()

    def bubble(self) -> Bubble | None:
        """Returns the bubble of the pipeline whose stages the members compute. None if they compute no stages."""
        return bubble_of(it.times for it in self.members)

    def to_proto(self) -> group_pb2.GroupStatus:
        """Returns the message that carries the status."""
        return group_pb2.GroupStatus(
            group=self.name,
            submitter=self.submitter,
            generation=self.generation,
            size=self.size,
            ranks=self.ranks,
            min_ranks=self.min_ranks,
            waits_for=self.waits_for,
            straggler=self.straggler.to_proto() if self.straggler else None,
            members=[it.to_proto() for it in self.members],
        )

    @classmethod
    def from_proto(cls, message: group_pb2.GroupStatus) -> "GroupStatus":
        """Returns the status that a message carries."""
        return cls(
            name=message.group,
            submitter=message.submitter,
            generation=message.generation,
            size=message.size,
            ranks=message.ranks,
            min_ranks=message.min_ranks,
            waits_for=message.waits_for,
            straggler=StragglerRank.from_proto(message.straggler) if message.HasField("straggler") else None,
            members=tuple(RankStatus.from_proto(it) for it in message.members),
        )


__all__ = ["GroupStatus", "RankStatus"]
