"""Slabs: arenas of one kind that lie next to each other, at a server and in a region of shared memory.

Small arenas of several shards share a slab, so that one kernel call or one copy handles all of them. Both ends of a
connection compute the same slabs from the layouts of the shards that a call names.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

from shoal._wire.layout import Aggregation, ArenaLayout, ShardLayout
from shoal._wire.limits import SLAB_BYTES

# An arena of a call: the number of its shard, and its index in the shard.
ArenaKey = tuple[int, int]

_REGION_ALIGNMENT = 64  # bytes: a cache line


@dataclass(frozen=True, eq=False)
class Slab:
    """Arenas of one dtype, wire dtype and aggregation, in the order of their shards and without gaps.

    Attributes:
        keys: the arenas.
        arenas: their layouts.
        starts: for each arena, the slab's element at which it starts.
        elements: number of elements of the slab.
    """

    keys: tuple[ArenaKey, ...]
    arenas: tuple[ArenaLayout, ...]
    starts: tuple[int, ...]
    elements: int

    @classmethod
    def of(cls, arenas: Sequence[tuple[ArenaKey, ArenaLayout]]) -> "Slab":
        """Returns the slab of these arenas, at least one."""
        *starts, elements = accumulate((layout.elements for _, layout in arenas), initial=0)
        return cls(tuple(key for key, _ in arenas), tuple(layout for _, layout in arenas), tuple(starts), elements)

    def split(self, flat: np.ndarray) -> Iterator[tuple[ArenaKey, np.ndarray]]:
        """Yields each arena of a flat array of the slab's elements, as a view."""
        for key, arena, start in zip(self.keys, self.arenas, self.starts, strict=True):
            yield key, flat[start : start + arena.elements]

    @cached_property
    def dtype(self) -> np.dtype:
        """Dtype of the variables."""
        return self.arenas[0].dtype

    @cached_property
    def wire_dtype(self) -> np.dtype:
        """Dtype of the elements in messages and regions."""
        return self.arenas[0].wire_dtype

    @cached_property
    def aggregation(self) -> Aggregation:
        """Aggregation of the variables."""
        return self.arenas[0].aggregation

    @cached_property
    def nbytes(self) -> int:
        """Bytes in messages and regions."""
        return self.elements * self.wire_dtype.itemsize


class CallLayout:
    """The shards that one call names, with the places of their elements.

    Args:
        shards: layouts of the shards, in the order of the request.

    Attributes:
        shards: as given.
        slabs: the slabs, in the order in which they lie in a region.
        offsets: for each slab, its offset in a region, in bytes.
        region_bytes: bytes of a region that holds all slabs.
        nbytes: bytes of all values in messages.
    """

    def __init__(self, shards: Iterable[ShardLayout]) -> None:
        self.shards = tuple(shards)
        self.slabs = slabs_of(self.shards)
        aligned = (-(-slab.nbytes // _REGION_ALIGNMENT) * _REGION_ALIGNMENT for slab in self.slabs)
        *self.offsets, self.region_bytes = accumulate(aligned, initial=0)
        self.nbytes = sum(slab.nbytes for slab in self.slabs)

    @cached_property
    def places(self) -> dict[ArenaKey, tuple[Slab, int]]:
        """For each arena, its slab and the byte of the slab at which it starts in messages."""
        return {
            key: (slab, start * slab.wire_dtype.itemsize)
            for slab in self.slabs
            for key, start in zip(slab.keys, slab.starts, strict=True)
        }

    def carrying(self, aggregations: Collection[Aggregation]) -> list[Slab]:
        """Returns the slabs of some aggregations."""
        return [slab for slab in self.slabs if slab.aggregation in aggregations]

    def arrays(self, region: np.ndarray, aggregations: Collection[Aggregation] = tuple(Aggregation)) -> "SlabArrays":
        """Returns the slabs in a region as flat arrays of their wire dtype.

        Args:
            region: unsigned bytes, at least `region_bytes`.
            aggregations: selects the slabs.

        Returns:
            The arrays by slab, as views of the region.
        """
        return {
            slab: region[offset : offset + slab.nbytes].view(slab.wire_dtype)
            for slab, offset in zip(self.slabs, self.offsets, strict=True)
            if slab.aggregation in aggregations
        }


SlabArrays = dict[Slab, np.ndarray]


def slabs_of(shards: Iterable[ShardLayout]) -> list[Slab]:
    """Returns the slabs of some shards.

    The kinds come in the order of their first arenas, and the arenas of a kind in the order of the shards. A slab ends
    before the arena with which it would exceed SLAB_BYTES; a larger arena has a slab of its own.
    """
    kinds: dict[tuple[np.dtype, np.dtype, Aggregation], list[tuple[ArenaKey, ArenaLayout]]] = {}
    for layout in shards:
        for index, arena in enumerate(layout.arenas):
            kind = arena.dtype, arena.wire_dtype, arena.aggregation
            kinds.setdefault(kind, []).append(((layout.shard, index), arena))
    return [Slab.of(run) for arenas in kinds.values() for run in _runs(arenas)]


def _runs(arenas: Iterable[tuple[ArenaKey, ArenaLayout]]) -> Iterable[list[tuple[ArenaKey, ArenaLayout]]]:
    run: list[tuple[ArenaKey, ArenaLayout]] = []
    nbytes = 0
    for arena in arenas:
        if run and nbytes + arena[1].nbytes > SLAB_BYTES:
            yield run
            run, nbytes = [], 0
        run.append(arena)
        nbytes += arena[1].nbytes
    yield run


__all__ = ["ArenaKey", "CallLayout", "Slab", "SlabArrays", "slabs_of"]
