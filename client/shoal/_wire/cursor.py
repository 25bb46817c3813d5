"""Cursor of a worker in its data. Workers send it with each push, and shards keep it for checkpoints."""

from dataclasses import dataclass

from shoal.v1 import parameter_server_pb2 as pb


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A worker's position in its leased range.

    Attributes:
        lease: number of the lease.
        consumed: samples of the range that the worker has trained on.
    """

    lease: int
    consumed: int

    def to_proto(self) -> pb.DataCursor:
        """Returns the message that carries this cursor."""
        return pb.DataCursor(lease=self.lease, consumed=self.consumed)

    @classmethod
    def from_proto(cls, message: pb.DataCursor) -> "Cursor":
        """Returns the cursor that a message carries."""
        return cls(message.lease, message.consumed)


__all__ = ["Cursor"]
