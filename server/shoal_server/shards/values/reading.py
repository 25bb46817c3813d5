"""Reading: one reader's use of the values of some shards, for as long as they are being sent."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from shoal._wire import Aggregation, Chunk, chunks_of
from shoal._wire.limits import CHUNK_BYTES
from shoal_server.optimizers import conversions
from shoal_server.shards.values.reader_memory import ReaderHold, ReaderMemory
from shoal_server.shards.values.selection import Selection
from shoal_server.shards.values.snapshot import Snapshot


class Reading:
    """One reader's use of the values of some shards, at one version. `with` ends it.

    Args:
        version: updates applied; the same for all shards.
        shards: the shards.
        snapshots: snapshots of their slabs, by the slab's index in the group. The caller holds the group's lock.
        counting: the lock that guards their counts.
        memory: counts the bytes that readers use.
        hold: this reader's part of them, which ends with the reading; None if it is not counted.
        slot: the optimizer slot to read, of trainable slabs alone; "" means the values.

    Attributes:
        version: as given.
        check: raises Overloaded if the reader is too slow and its memory is needed.
    """

    def __init__(
        self,
        version: int,
        shards: Selection,
        snapshots: Mapping[int, Snapshot],
        counting: threading.Lock,
        memory: ReaderMemory,
        hold: ReaderHold | None,
        slot: str = "",
    ) -> None:
        self.version, self._shards, self._snapshots, self._counting = version, shards, snapshots, counting
        self._memory, self._hold, self._slot = memory, hold, slot
        self.check: Callable[[], object] = hold.check if hold else bool
        self._count(1)

    @property
    def values(self) -> Sequence[np.ndarray]:
        """The flat values of each slab of the call, as the server keeps them; valid until the end of the reading.

        Of a slot, a slab that has none has its values here.
        """
        return self._shards.gathered({index: it.array(self._slot) for index, it in self._snapshots.items()})

    def chunks(self) -> Iterator[Chunk]:
        """Yields the values as chunks. Half-precision chunks are copies.

        All other chunks are views of the slabs' memory, valid until the end of the reading.
        """
        for slab, values in zip(self._shards.layout.slabs, self.values, strict=True):
            if self._slot and slab.aggregation is not Aggregation.TRAINABLE:
                continue
            if values.dtype == slab.wire_dtype:
                yield from chunks_of(slab, values)
                continue
            step = CHUNK_BYTES // slab.wire_dtype.itemsize
            for start in range(0, slab.elements, step):
                elements = np.empty(min(step, slab.elements - start), slab.wire_dtype)
                conversions.send(elements, values[start : start + step])
                yield from chunks_of(slab, elements, start * slab.wire_dtype.itemsize)

    def __enter__(self) -> "Reading":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Lets later updates change the memory."""
        self._count(-1)
        if self._hold:
            self._memory.release(self._hold)

    def _count(self, change: int) -> None:
        with self._counting:
            for snapshot in self._snapshots.values():
                snapshot.readers += change
                snapshot.savers += change if self._slot else 0
