"""Stored shards: the shards of a lock group, and the slabs that hold their values."""

import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from shoal._memory.buffers import BufferPool
from shoal._wire import ArenaKey, CallLayout, ShardLayout, Slab
from shoal_server.optimizers import kernels, norms
from shoal_server.shards.machine.mode import Apply, Contribution
from shoal_server.shards.values.shard import Arena, JobShardConfig, Shard
from shoal_server.shards.values.snapshot import ShardSnapshot
from shoal_server.shards.values.stored_slab import StoredSlab, stored_bytes

# The gradients of a push by slab, as indexes of `StoredShards.slabs`. They are finite, in the dtype that the server
# keeps. A slab that has taken its array removes it, so that nothing else keeps its memory.
Payload = MutableMapping[int, np.ndarray]


def needed_bytes(config: JobShardConfig, layouts: Iterable[ShardLayout]) -> int:
    """Returns the bytes that the values and slots of shards will take."""
    return sum(stored_bytes(slab, config.optimizer) for slab in CallLayout(layouts).slabs)


@dataclass(slots=True)
class Extent:
    """Elements [start, stop) of the group's slab `index`, as the next elements of another slab."""

    index: int
    start: int
    stop: int


class StoredShards:
    """The shards of a lock group. Its lock guards the values; the rest does not change.

    Args:
        config: the job's configuration.
        layouts: layouts of the shards, which are allocated and filled with their initial values.
        counting: guards the numbers of readers of all snapshots.
        earlier: shards that stay as they are.
        fills: whether the shards get their initial values; if not, somebody else fills values and slots.
        slab_of: returns the stored slab for a slab, instead of a new one.

    Attributes:
        by_number: the shards, in the order of their creation.
        slabs: the slabs that hold their values.
        value_bytes: bytes of values, which a gradient takes as well.
        values_id: identifies the memory of the current values, for as long as they do not change.
        places: for each arena, the index of its slab, and the slab's element at which it starts.
    """

    def __init__(
        self,
        config: JobShardConfig,
        layouts: Iterable[ShardLayout],
        counting: threading.Lock,
        earlier: "StoredShards | None" = None,
        *,
        fills: bool = True,
        slab_of: Callable[[Slab], StoredSlab] | None = None,
    ) -> None:
        layout = CallLayout(layouts)
        self._clip_norm = config.optimizer.clip_norm

        def new(slab: Slab) -> StoredSlab:
            return StoredSlab(slab, config.variables, config.optimizer, config.seed, counting, fills=fills)

        slabs = [*map(slab_of or new, layout.slabs)]
        self.slabs: Sequence[StoredSlab] = [*(earlier.slabs if earlier else ()), *slabs]
        self.value_bytes = sum(slab.values.nbytes for slab in self.slabs)
        self.values_id = object()
        self.places: dict[ArenaKey, tuple[int, int]] = {
            key: (index, start)
            for index, stored in enumerate(self.slabs)
            for key, start in zip(stored.slab.keys, stored.slab.starts, strict=True)
        }
        self.by_number: dict[int, Shard] = dict(earlier.by_number) if earlier else {}
        self.by_number |= {shard.shard: Shard(config.name, shard, [*self._arenas(shard)]) for shard in layout.shards}

    def _arenas(self, layout: ShardLayout) -> Iterator[Arena]:
        for index, arena in enumerate(layout.arenas):
            slab, start = self.places[layout.shard, index]
            yield Arena(arena, self.slabs[slab], start)

    @property
    def nbytes(self) -> int:
        """Bytes of values and slots."""
        return sum(slab.nbytes for slab in self.slabs)

    def read_bytes(self, indexes: Iterable[int], *, slots: bool) -> tuple[object, int, int]:
        """Returns what a reader of some slabs may keep: an identity of that memory, its bytes, and those of all slabs.

        Args:
            indexes: indexes of the slabs.
            slots: whether it reads a slot. An update then leaves it the values and all slots.
        """
        if slots:
            return (self.values_id, "slots"), sum(self.slabs[index].nbytes for index in indexes), self.nbytes
        return self.values_id, sum(self.slabs[index].values.nbytes for index in indexes), self.value_bytes

    def extents(self, slab: Slab) -> list[Extent]:
        """Returns the elements of the slabs here that make up a slab of some of the arenas."""
        found: list[Extent] = []
        for key, arena in zip(slab.keys, slab.arenas, strict=True):
            index, start = self.places[key]
            if found and (found[-1].index, found[-1].stop) == (index, start):
                found[-1].stop += arena.elements
            else:
                found.append(Extent(index, start, start + arena.elements))
        return found

    def whole(self, extents: Sequence[Extent]) -> StoredSlab | None:
        """Returns the slab that is the only one of these extents, with all its elements; None if there is none."""
        slab, extent = self.slabs[extents[0].index], extents[0]
        return slab if len(extents) == 1 and (extent.start, extent.stop) == (0, slab.slab.elements) else None

    def part(self, config: JobShardConfig, numbers: Iterable[int], counting: threading.Lock) -> "StoredShards":
        """Returns some of the shards, for another group. This object must not change any more.

        Slabs that the part has as a whole keep their memory and their readers. So no large slab is copied. The elements
        of the other slabs, which are small, are copied.

        Args:
            config: the job's configuration.
            numbers: the shards.
            counting: the lock of this group's snapshots. The part has to use it, too.
        """

        def moved(slab: Slab) -> StoredSlab:
            extents = self.extents(slab)
            if (whole := self.whole(extents)) is not None:
                return whole
            new = StoredSlab(slab, config.variables, config.optimizer, config.seed, counting, fills=False)
            new.copy_from((self.slabs[it.index], it.start, it.stop) for it in extents)
            return new

        return StoredShards(config, [self.by_number[it].layout for it in numbers], counting, slab_of=moved)

    def part_shapes(self, layouts: Iterable[ShardLayout]) -> list[np.ndarray]:
        """Returns an array of zeros for each slab that a part with these shards would have, of its size and dtype.

        Args:
            layouts: layouts of the shards.
        """
        slabs = CallLayout(layouts).slabs
        dtypes = [self.slabs[self.places[slab.keys[0]][0]].values.dtype for slab in slabs]
        return [np.broadcast_to(dtype.type(0), (it.elements,)) for it, dtype in zip(slabs, dtypes, strict=True)]

    def values_hash(self) -> int:
        """Returns an XXH3 hash of all values and slots, which tells whether a backup has the same bits."""
        found = xxhash.xxh3_64()
        for slab in self.slabs:
            for array in (slab.values, *slab.slots.values()):
                found.update(array.data.cast("B"))
        return found.intdigest()

    def leave_to_readers(self, memory: BufferPool) -> None:
        """Moves the slabs that readers use to new memory. Called before the values change."""
        self.values_id = object()
        for slab in self.slabs:
            slab.leave_to_readers(memory)

    def begin_saving(self, version: int) -> list[ShardSnapshot]:
        """Returns a snapshot of each shard; see `Shard.begin_saving`."""
        return [shard.begin_saving(version) for shard in self.by_number.values()]

    def fold(self, contribution: Contribution, expected: int) -> None:
        """Adds a contribution to the running sums, and drops its gradients.

        Args:
            contribution: the contribution.
            expected: number of contributions to the step, as far as known.
        """
        for index, slab in enumerate(self.slabs):
            array = contribution.payload.pop(index, None)
            if array is not None:
                slab.fold(array, contribution.weight, expected)

    def measure(self) -> tuple[float, ...]:
        """Ends the running sums of gradients, and returns the sum of the squares of each slice of their results."""
        return tuple(square for slab in self.slabs for square in slab.measure())

    def apply(self, update: Apply, version: int) -> None:
        """Applies one update to each slab for which a contribution has values.

        Args:
            update: the contributions, in order of rank. Those after the first `folded` ones lose their gradients.
            version: updates applied before this one.
        """
        scale = update.learning_rate_scale
        if not self._clip_norm:
            for slab, parts, weights in self._taken(update):
                slab.apply(
                    parts,
                    weights,
                    version=version,
                    scale=scale,
                    expected=update.expected,
                    learning_rate=update.learning_rate,
                )
            return
        combined = [
            (slab, slab.combine(parts, weights, update.expected)) for slab, parts, weights in self._taken(update)
        ]
        gradients = [(slab, gradient) for slab, gradient in combined if gradient is not None]
        squares = update.squares
        if squares is None:  # these are all shards of the job
            squares = norms.total(square for slab, gradient in gradients for square in slab.squares(gradient))
        factor = norms.clip_factor(squares, self._clip_norm)
        for slab, gradient in gradients:
            if factor < 1:
                kernels.scale(gradient, factor)
            slab.update(gradient, version=version, scale=scale, learning_rate=update.learning_rate)

    def _taken(self, update: Apply) -> Iterator[tuple[StoredSlab, list[np.ndarray], list[float]]]:
        """Yields each slab of an update, with the arrays and weights that are not folded yet."""
        rest = update.contributions[update.folded :]
        for index, slab in enumerate(self.slabs):
            parts = [part for part in rest if index in part.payload]
            if parts or slab.folded:
                yield slab, [part.payload.pop(index) for part in parts], [part.weight for part in parts]


__all__ = ["Extent", "Payload", "StoredShards", "needed_bytes"]
