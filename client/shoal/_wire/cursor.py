"""Records of a worker in a checkpoint: its position in its data, and its pushes so far.

Workers send the position with each push. Shards keep it, and count the applied pushes.
"""

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


@dataclass(frozen=True, slots=True, order=True)
class PushCounts:
    """The pushes of a worker since it entered a job.

    Attributes:
        incarnation: the worker's incarnation.
        pushes: number of pushes.
        samples: samples in these pushes.
    """

    incarnation: int
    pushes: int = 0
    samples: int = 0


__all__ = ["Cursor", "PushCounts"]
