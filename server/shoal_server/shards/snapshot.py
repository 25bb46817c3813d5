"""Snapshot of a shard: its values at one version, copied only when an update is about to change them."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal._wire import Chunk, ShardLayout
from shoal._wire.limits import CHUNK_BYTES
from shoal_server.optimizers import conversions
from shoal_server.shards.events import AnswerCut


class Snapshot:
    """A shard's values at one version, for any number of concurrent readers. `with` ends one reader's use.

    It shares the shard's memory. Before an update, the shard checks `in_use`; if there are readers, it leaves the
    memory to them and continues with a copy. Consequences:

    - In synchronous training, updates happen between pulls, so nothing is copied.
    - A large variable is sent without a second copy in memory.
    - A slow reader does not delay updates.

    Args:
        version: updates applied.
        layout: layout of the shard.
        values: flat values of each arena, in the dtypes that the server keeps.
        slots: slots of each arena, by name; read only while it is being saved.
        counting: guards the counts of readers; the snapshots of a lock group share it.
    """

    def __init__(
        self,
        version: int,
        layout: ShardLayout,
        values: Sequence[np.ndarray],
        slots: Sequence[Mapping[str, np.ndarray]] = (),
        counting: "threading.Lock | None" = None,
    ) -> None:
        self.version, self.layout, self._values, self._slots = version, layout, values, slots
        # Guards the counts; taken alone or after the group's lock, and no lock is taken under it.
        self._lock = counting or threading.Lock()
        self._readers = 0  # includes the savers
        self._savers = 0

    def begin(self) -> "Snapshot":
        """Adds a reader. The shard calls it under its lock."""
        with self._lock:
            self._readers += 1
        return self

    def begin_saving(self) -> "Snapshot":
        """Adds a reader that also reads slots, until `end_saving`. The shard calls it under its lock."""
        with self._lock:
            self._readers += 1
            self._savers += 1
        return self

    def end_saving(self) -> None:
        """Ends one `begin_saving`."""
        with self._lock:
            self._readers -= 1
            self._savers -= 1

    @property
    def in_use(self) -> bool:
        """Whether there are readers."""
        with self._lock:
            return self._readers > 0

    @property
    def being_saved(self) -> bool:
        """Whether a reader also reads the slots."""
        with self._lock:
            return self._savers > 0

    @property
    def slots(self) -> Sequence[Mapping[str, np.ndarray]]:
        """Flat slots of each arena, by name; valid while the snapshot is being saved."""
        return self._slots

    def chunks(self) -> Iterator[Chunk]:
        """Yields the values as chunks. Half-precision chunks are copies.

        All other chunks are views of the shard's memory, valid while the snapshot is in use.
        """
        for index, (arena, values) in enumerate(zip(self.layout.arenas, self._values, strict=True)):
            step = CHUNK_BYTES // arena.wire_dtype.itemsize
            for start in range(0, arena.elements, step):
                elements = values[start : start + step]
                if elements.dtype != arena.wire_dtype:
                    elements = np.empty(elements.size, arena.wire_dtype)
                    conversions.send(elements, values[start : start + step])
                data = elements.view(np.uint8).data
                yield Chunk(self.layout.shard, index, start * arena.wire_dtype.itemsize, data)

    @property
    def values(self) -> Sequence[np.ndarray]:
        """Flat values of each arena, as the server keeps them; valid while the snapshot is in use."""
        return self._values

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._readers -= 1


class Reading:
    """One reader's use of the snapshots of some shards, at one version. `with` ends it.

    Args:
        version: updates applied; the same for all shards.
        snapshots: snapshots of the shards. The caller holds the group's lock.
        counting: the lock that guards their counts.
    """

    def __init__(self, version: int, snapshots: Sequence[Snapshot], counting: threading.Lock) -> None:
        self.version, self.snapshots, self._counting = version, snapshots, counting
        self._count(1)

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_: object) -> None:
        self._count(-1)

    def _count(self, change: int) -> None:
        with self._counting:
            for snapshot in self.snapshots:
                snapshot._readers += change


@dataclass(frozen=True, slots=True)
class Cut:
    """The state of a group's shards for a checkpoint. The owner must end each snapshot with `end_saving`."""

    answer: AnswerCut
    snapshots: Sequence[Snapshot]
