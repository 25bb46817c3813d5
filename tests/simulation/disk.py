"""Disks of one run: the checkpoint storage that all servers share, and the durable store of the coordinator."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal import errors
from shoal.v1 import state_pb2
from simulation.messages import PushName


@dataclass(frozen=True)
class ShardFile:
    """What a server writes into a checkpoint: of each lock group, which pushes its values are the sum of."""

    groups: tuple[frozenset[PushName], ...]
    version: int


@dataclass(frozen=True)
class SavedState:
    """The manifest of a checkpoint."""

    created_at: float
    step: int
    version: int
    data: state_pb2.LedgerRecord | None
    progress_totals: state_pb2.ProgressRecord
    pushes: frozenset[PushName]


@dataclass
class CheckpointDisk:
    """The checkpoint storage.

    Attributes:
        away: whether it cannot be read or written now.
        files: by number of the checkpoint, number of the cut, and server.
        manifests: by number of the checkpoint.
    """

    away: bool = False
    files: dict[tuple[int, int, str], ShardFile] = field(default_factory=dict)
    manifests: dict[int, SavedState] = field(default_factory=dict)

    def check(self) -> None:
        """Raises StorageFailed if the storage is away."""
        if self.away:
            raise errors.StorageFailed("the checkpoint storage is away")

    def numbers(self) -> list[int]:
        """Returns the numbers of the complete checkpoints."""
        self.check()
        return sorted(self.manifests)

    def largest(self) -> int:
        """Returns the largest number in use."""
        self.check()
        return max([*self.manifests, *(number for number, _, _ in self.files)], default=0)

    def remove(self, number: int) -> None:
        """Removes a checkpoint."""
        self.check()
        self.manifests.pop(number, None)
        for key in [key for key in self.files if key[0] == number]:
            del self.files[key]


class MetadataDisk:
    """The coordinator's store, which survives the coordinator. A write is atomic."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}

    def load(self) -> dict[str, bytes]:
        """Returns all records."""
        return dict(self._records)

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        """Writes changes. None removes a record."""
        for key, record in changes.items():
            if record is None:
                self._records.pop(key, None)
            else:
                self._records[key] = record


__all__ = ["CheckpointDisk", "MetadataDisk", "SavedState", "ShardFile"]
