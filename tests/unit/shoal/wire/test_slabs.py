"""Slabs: small arenas of one kind lie next to each other, and regions have room for all slabs."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shoal._wire.layout import Aggregation, ArenaLayout, ShardLayout, Slice
from shoal._wire.limits import SLAB_BYTES
from shoal._wire.slabs import CallLayout, slabs_of


def arena(
    elements: int, dtype: str = "float32", aggregation: Aggregation = Aggregation.TRAINABLE, wire: str | None = None
) -> ArenaLayout:
    slices = (Slice("v", 0, elements, 0),)
    return ArenaLayout(np.dtype(dtype), aggregation, slices, elements, np.dtype(wire or dtype))


layouts = st.lists(
    st.lists(
        st.builds(
            arena,
            st.integers(1, 40) | st.just(SLAB_BYTES // 8) | st.just(SLAB_BYTES),
            st.sampled_from(["float32", "float64", "int64"]),
            st.sampled_from(Aggregation),
        ),
        max_size=3,
    ),
    max_size=6,
).map(lambda shards: [ShardLayout(3 * number + 1, tuple(arenas)) for number, arenas in enumerate(shards)])


@given(layouts)
def test_each_arena_lies_in_one_slab_of_its_kind(shards: Sequence[ShardLayout]) -> None:
    slabs = slabs_of(shards)
    keys = [key for slab in slabs for key in slab.keys]
    assert sorted(keys) == [(shard.shard, index) for shard in shards for index in range(len(shard.arenas))]
    by_number = {shard.shard: shard for shard in shards}
    for slab in slabs:
        end = 0
        for (shard, index), layout, start in zip(slab.keys, slab.arenas, slab.starts, strict=True):
            assert layout is by_number[shard].arenas[index]
            assert (layout.dtype, layout.wire_dtype, layout.aggregation) == (
                slab.dtype,
                slab.wire_dtype,
                slab.aggregation,
            )
            assert start == end, "a gap, or an overlap"
            end += layout.elements
        assert end == slab.elements
        assert list(slab.keys) == sorted(slab.keys), "not in the order of the shards"
        assert slab.nbytes <= SLAB_BYTES or len(slab.keys) == 1


@given(layouts)
def test_slabs_lie_in_a_region_in_order_aligned_and_apart(shards: Sequence[ShardLayout]) -> None:
    layout = CallLayout(shards)
    free = 0
    for slab, offset in zip(layout.slabs, layout.offsets, strict=True):
        assert offset % 64 == 0
        assert free <= offset < free + 64
        free = offset + slab.nbytes
    assert free <= layout.region_bytes < free + 64
    assert layout.region_bytes % 64 == 0
    assert layout.nbytes == sum(shard.nbytes for shard in shards)


def test_small_arenas_of_a_kind_share_a_slab() -> None:
    shards = [
        ShardLayout(4, (arena(17), arena(3, "float64"))),
        ShardLayout(2, (arena(16),)),
        ShardLayout(7, (arena(16, "float32", wire="bfloat16"), arena(5))),
    ]
    layout = CallLayout(shards)
    assert [(slab.keys, slab.starts, slab.elements) for slab in layout.slabs] == [
        (((4, 0), (2, 0), (7, 1)), (0, 17, 33), 38),
        (((4, 1),), (0,), 3),
        (((7, 0),), (0,), 16),
    ]
    assert (layout.offsets, layout.region_bytes) == ([0, 192, 256], 320)
    assert layout.places[7, 1] == (layout.slabs[0], 33 * 4)


def test_a_large_arena_has_a_slab_of_its_own() -> None:
    third = SLAB_BYTES // 4 // 3
    sizes = [third, third, third, third, SLAB_BYTES, 1]
    shards = [ShardLayout(number, (arena(size),)) for number, size in enumerate(sizes)]
    assert [[shard for shard, _ in slab.keys] for slab in slabs_of(shards)] == [[0, 1, 2], [3], [4], [5]]


def test_no_shards_need_no_memory() -> None:
    layout = CallLayout([])
    assert (layout.slabs, layout.offsets, layout.region_bytes) == ([], [], 0)


def test_slabs_of_some_aggregations_keep_their_places() -> None:
    kinds = [Aggregation.SUM, Aggregation.TRAINABLE, Aggregation.MEAN, Aggregation.TRAINABLE]
    layout = CallLayout([ShardLayout(5, tuple(arena(1, aggregation=kind) for kind in kinds))])
    assert [slab.keys for slab in layout.carrying([Aggregation.TRAINABLE])] == [((5, 1), (5, 3))]
    assert layout.carrying([]) == []
    region = np.arange(layout.region_bytes, dtype=np.uint8)
    (array,) = layout.arrays(region, [Aggregation.TRAINABLE]).values()
    assert array.tobytes() == region[64:72].tobytes()
