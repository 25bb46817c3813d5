"""The values of a shard at one version, for whoever sends them, copied only when an update is about to change them."""

import threading
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from shoal._wire import Chunk, ShardLayout
from shoal._wire.limits import CHUNK_BYTES
from shoal_server.optimizers import conversions


class Snapshot:
    """A shard's values at one version, for any number of readers at once; `with` ends one reader's use of it.

    It is the shard's own memory. While anybody reads it, it stays as it is: before an update the shard sees that it is
    `in_use`, leaves it to its readers, and goes on with a copy. So in synchronous training, where updates come between
    pulls, nothing is ever copied, a variable of any size is sent without a second one in memory, and no reader, however
    slow, holds up an update.

    Args:
        version: updates applied.
        layout: of the shard.
        values: of each arena, as the server keeps them.
        slots: of each arena, by name, likewise: read by those alone who save it.
    """

    def __init__(
        self,
        version: int,
        layout: ShardLayout,
        values: Sequence[np.ndarray],
        slots: Sequence[Mapping[str, np.ndarray]] = (),
    ) -> None:
        self.version, self.layout, self._values, self._slots = version, layout, values, slots
        self._lock = threading.Lock()  # guards the counts; taken after the shard's or alone, and nothing after it
        self._readers = 0  # those who save it among them
        self._savers = 0

    def begin(self) -> "Snapshot":
        """Counts one more reader: for the shard, under its lock."""
        with self._lock:
            self._readers += 1
        return self

    def begin_saving(self) -> "Snapshot":
        """Counts one more who reads slots, too, until `end_saving`: likewise."""
        with self._lock:
            self._readers += 1
            self._savers += 1
        return self

    def end_saving(self) -> None:
        """One of those has come to its end."""
        with self._lock:
            self._readers -= 1
            self._savers -= 1

    @property
    def in_use(self) -> bool:
        """Whether anybody reads it."""
        with self._lock:
            return self._readers > 0

    @property
    def being_saved(self) -> bool:
        """Whether anybody reads the slots, too."""
        with self._lock:
            return self._savers > 0

    @property
    def slots(self) -> Sequence[Mapping[str, np.ndarray]]:
        """Those of each arena, flat, by name; good while it is being saved."""
        return self._slots

    def chunks(self) -> Iterator[Chunk]:
        """The values as chunks: views of the shard's memory, but for halves. They are good while it is in use."""
        for index, (arena, values) in enumerate(zip(self.layout.arenas, self._values, strict=True)):
            step = CHUNK_BYTES // arena.wire.itemsize
            for start in range(0, arena.elements, step):
                elements = values[start : start + step]
                if elements.dtype != arena.wire:
                    elements = np.empty(elements.size, arena.wire)
                    conversions.send(elements, values[start : start + step])
                data = elements.view(np.uint8).data
                yield Chunk(self.layout.shard, index, start * arena.wire.itemsize, data)

    @property
    def values(self) -> Sequence[np.ndarray]:
        """Those of each arena, flat, as the server keeps them; good while it is in use."""
        return self._values

    def __enter__(self) -> "Snapshot":
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._readers -= 1
