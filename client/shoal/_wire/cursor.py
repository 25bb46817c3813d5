"""Where a worker is in its data: workers say it with each push, shards keep it for checkpoints."""

from dataclasses import dataclass

from shoal.v1 import parameter_server_pb2 as pb


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """A place in a range of data: so many samples of what was leased have been trained on."""

    lease: int
    consumed: int

    def to_proto(self) -> pb.DataCursor:
        """The message that carries it."""
        return pb.DataCursor(lease=self.lease, consumed=self.consumed)

    @classmethod
    def from_proto(cls, message: pb.DataCursor) -> "Cursor":
        """The one that a message carries."""
        return cls(message.lease, message.consumed)


__all__ = ["Cursor"]
