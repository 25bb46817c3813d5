"""Shard store: the limit of bytes, which holds before anything is allocated."""

import tracemalloc

import pytest

from shoal import consistency, errors, optim
from shoal._wire import ShardLayout
from shoal.v1 import tensor_pb2
from shoal.variables import Variable
from shoal_server.shards import JobShardConfig, ShardStore

FLOATS = 1_000


def config(name: str, generation: int = 1) -> JobShardConfig:
    return JobShardConfig(
        name=name,
        generation=generation,
        variables={"w": Variable(1 << 37)},
        optimizer=optim.Adam(),
        consistency=consistency.Asynchronous(),
        seed=0,
    )


def layout(rows: int, shard: int = 0) -> ShardLayout:
    part = tensor_pb2.Slice(variable="w", row_start=0, row_stop=rows)
    arena = tensor_pb2.ArenaLayout(dtype=tensor_pb2.FLOAT32, aggregation=tensor_pb2.TRAINABLE, slices=[part])
    return ShardLayout.from_proto(tensor_pb2.ShardLayout(shard=shard, arenas=[arena]), {"w": Variable(1 << 37)})


def test_shards_beyond_the_limit_are_refused_before_they_are_allocated() -> None:
    store = ShardStore(most_bytes=1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(errors.LimitExceeded, match=r"the limit SHARD_BYTES is 1073741824 \(--max-shard-bytes\)"):
            store.create(config("a"), [layout(1 << 37)])  # 1.5 TiB with the slots of Adam
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert store.hosted.all() == []


def test_values_and_slots_of_all_jobs_count_until_they_are_dropped() -> None:
    store = ShardStore(most_bytes=2 * 12 * FLOATS)
    assert store.create(config("a"), [layout(FLOATS)]) == 12 * FLOATS
    assert store.create(config("a"), [layout(FLOATS)]) == 12 * FLOATS, "a repeated call"
    assert store.create(config("b"), [layout(FLOATS)]) == 12 * FLOATS
    with pytest.raises(errors.LimitExceeded, match="the shards of c need 12 bytes here, and other shards have 24000"):
        store.create(config("c"), [layout(1)])
    with pytest.raises(errors.LimitExceeded):
        store.create(config("a"), [layout(FLOATS), layout(1, shard=1)])
    assert store.create(config("a", generation=2), [layout(FLOATS)]) == 12 * FLOATS, "it replaces the earlier shards"
    store.drop("b")
    store.create(config("c"), [layout(1)])
    store.clear()
