"""Order of a user that a server drains."""

from dataclasses import dataclass

from shoal.v1 import state_pb2


@dataclass(frozen=True, slots=True)
class DrainOrder:
    """How a server drains because a user wants it.

    Attributes:
        stay: whether the server stays a member when it is drained, until it is stopped.
        force: whether it drains even if live jobs then lose their values, or have no other server.
    """

    stay: bool = False
    force: bool = False

    def to_proto(self) -> state_pb2.DrainOrder:
        """Returns the record of this order."""
        return state_pb2.DrainOrder(stay=self.stay, force=self.force)

    @classmethod
    def from_proto(cls, record: state_pb2.DrainOrder) -> "DrainOrder":
        """Returns the order of a record."""
        return cls(record.stay, record.force)
