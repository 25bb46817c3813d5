"""Communication options: how processes join the arrays of their replicas."""

from dataclasses import dataclass
from enum import StrEnum

from shoal import errors

# Bytes of arrays that are joined together, unless the options say otherwise.
BUCKET_BYTES = 4 << 20


class CommunicationImplementation(StrEnum):
    """What carries arrays between processes.

    - `AUTO`: NCCL if all processes are on one host and compute on GPUs of their own, otherwise a ring.
    - `RING`: shared memory within a host, and the connections of the group, which are protected, between hosts.
    - `NCCL`: NCCL, also between hosts. It neither encrypts nor authenticates: use it only in a network that you trust.
    """

    AUTO = "auto"
    RING = "ring"
    NCCL = "nccl"


@dataclass(frozen=True)
class CommunicationOptions:
    """How processes join the arrays of their replicas.

    Args:
        bytes_per_pack: arrays are joined so many bytes at a time, or more; 0 means 4 MiB.
        timeout_seconds: accepted for TensorFlow's sake, and not used: if a process stalls or ends, the others get
            `RankLost` within seconds.
        implementation: what carries the arrays. All processes give the same one.

    Raises:
        BadRequest: a number is negative, or the implementation is unknown.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: CommunicationImplementation | str = CommunicationImplementation.AUTO

    def __post_init__(self) -> None:
        if self.bytes_per_pack < 0:
            raise errors.BadRequest(f"bytes_per_pack is {self.bytes_per_pack}; give 0 or more")
        given = str(self.implementation).lower()
        try:
            object.__setattr__(self, "implementation", CommunicationImplementation(given))
        except ValueError:
            names = ", ".join(CommunicationImplementation)
            raise errors.BadRequest(f"the implementation {given!r} is unknown; give one of {names}") from None

    @property
    def pack_bytes(self) -> int:
        """Bytes of arrays that are joined together."""
        return self.bytes_per_pack or BUCKET_BYTES


__all__ = ["BUCKET_BYTES", "CommunicationImplementation", "CommunicationOptions"]
