"""The values of a shard at one version, for whoever sends them, copied only when an update is about to change them."""

import threading
from collections.abc import Iterator, Sequence

import numpy as np

from shoal._buffers import BufferPool
from shoal._chunks import Chunk
from shoal._layout import ShardLayout
from shoal._limits import CHUNK_BYTES
from shoal_server import conversions

# Elements that are read under the lock at a time: an update waits no longer than that takes.
_BLOCK = 1 << 22


class Snapshot:
    """A shard's values at one version.

    It looks at the shard's own memory for as long as that holds this version. Before an update the shard calls
    `detach`, which copies what readers have not read yet. So in synchronous training, where updates come between pulls,
    nothing is ever copied, and a variable of any size is sent without a second one in memory.

    Args:
        version: updates applied.
        layout: of the shard.
        values: of each arena, as the server keeps them; read only while nobody changes them.
        memory: for the copies.
    """

    def __init__(self, version: int, layout: ShardLayout, values: Sequence[np.ndarray], memory: BufferPool) -> None:
        self.version, self.layout = version, layout
        self._memory = memory
        # Guards what follows. Taken after the shard's lock by `detach`, alone by readers; nothing is taken after it.
        self._lock = threading.Lock()
        # By arena: memory and the element that it begins with. None: all readers are past it.
        self._sources: list[tuple[np.ndarray, int] | None] = [(array, 0) for array in values]
        self._readers: dict[SnapshotReader, tuple[int, int]] = {}  # the arena and element that each reads next
        self._detached = False

    def reader(self) -> "SnapshotReader | None":
        """Begins to read; None: too late, an update has come and kept only what others still need."""
        with self._lock:
            if self._detached:
                return None
            reader = SnapshotReader(self)
            self._readers[reader] = (0, 0)
            return reader

    def detach(self) -> None:
        """The shard's memory is about to change."""
        with self._lock:
            if self._detached:
                return
            self._detached = True
            first, element = min(self._readers.values(), default=(len(self._sources), 0))
            for index, source in enumerate(self._sources):
                if index < first or source is None:
                    self._sources[index] = None
                    continue
                begin = element if index == first else 0
                rest = source[0][begin:]
                copy = self._memory.take(rest.nbytes).view(rest.dtype)
                np.copyto(copy, rest)
                self._sources[index] = copy, begin

    def read(self, reader: "SnapshotReader", arena: int, start: int, target: np.ndarray) -> None:
        """Copies elements from `start` on, as many as `target` has, in the arena's dtype of the wire."""
        with self._lock:
            source = self._sources[arena]
            assert source is not None, "a reader is behind its own position"
            array, begin = source
            conversions.send(target, array[start - begin : start - begin + target.size])
            self._readers[reader] = (arena, start + target.size)

    def leave(self, reader: "SnapshotReader") -> None:
        """This reader is through, or gave up."""
        with self._lock:
            self._readers.pop(reader, None)


class SnapshotReader:
    """One pass over a snapshot, from its first arena to its last; `with` ends it."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self.version, self.layout = snapshot.version, snapshot.layout

    def chunks(self) -> Iterator[Chunk]:
        """The values as chunks, each in memory of its own."""
        for index, arena in enumerate(self.layout.arenas):
            step = CHUNK_BYTES // arena.wire.itemsize
            for start in range(0, arena.elements, step):
                elements = np.empty(min(step, arena.elements - start), arena.wire)
                self._snapshot.read(self, index, start, elements)
                data = elements.view(np.uint8).data
                yield Chunk(self.layout.shard, index, start * arena.wire.itemsize, data)

    def write(self, targets: Sequence[np.ndarray]) -> None:
        """Copies all values.

        Args:
            targets: by arena, flat, of the wire's dtype and the arena's size.
        """
        for index, target in enumerate(targets):
            for start in range(0, target.size, _BLOCK):
                self._snapshot.read(self, index, start, target[start : start + _BLOCK])

    def __enter__(self) -> "SnapshotReader":
        return self

    def __exit__(self, *_: object) -> None:
        self._snapshot.leave(self)
