"""Lock groups that are split: both parts do with later calls what the whole group would do, to the bit."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import consistency, errors, optim
from shoal._memory.buffers import BufferPool
from shoal._wire import Aggregation, ArenaLayout, Cursor, ShardLayout, Slab, Slice, slabs
from shoal.variables import Variable
from shoal_server.shards import JobShardConfig, LockGroup, ShardStore, Stamp
from shoal_server.shards.group import splittable_group
from shoal_server.shards.machine.worker_progress import WorkerProgress
from support.group_states import plain
from support.run_lengths import draws

SHARDS, SMALL, LARGE = 4, 5, 40  # elements; an arena of LARGE has a slab of its own
WORKERS = ["w0", "w1", "w2"]
MODES: list[consistency.Consistency] = [
    consistency.Synchronous(),
    consistency.Synchronous(backup_workers=1),
    consistency.Asynchronous(),
    consistency.Asynchronous(scale_by_staleness=True),
    consistency.BoundedStaleness(1),
]


def config(mode: consistency.Consistency, optimizer: optim.Optimizer | None = None) -> JobShardConfig:
    variables: dict[str, Variable] = {}
    for shard in range(SHARDS):
        variables |= {
            f"s{shard}": Variable(SMALL),
            f"c{shard}": Variable(2, "int64", trainable=False, aggregation="sum"),
        }
        variables[f"m{shard}"] = Variable(3, trainable=False, aggregation="mean")
    variables["l1"] = Variable(LARGE)
    return JobShardConfig("job", 1, variables, optimizer or optim.Adam(0.1), mode, 0)


def layout(job: JobShardConfig, shard: int) -> ShardLayout:
    arenas = []
    for name in (f"s{shard}", f"c{shard}", f"m{shard}", f"l{shard}"):
        if variable := job.variables.get(name):
            (rows,) = variable.shape
            arenas.append(ArenaLayout(variable.dtype, variable.aggregation, (Slice(name, 0, rows, 0),), rows))
    return ShardLayout(shard, tuple(arenas))


def store_of(job: JobShardConfig) -> ShardStore:
    store = ShardStore()
    store.create(job, [layout(job, shard) for shard in range(SHARDS)])
    return store


def gradient(slab: Slab, seed: int) -> np.ndarray:
    """Returns the gradient of a slab: the same for an arena in whatever slab it lies."""
    parts = [
        np.random.default_rng([seed, *key]).integers(-9, 9, it.elements)
        for key, it in zip(slab.keys, slab.arenas, strict=True)
    ]
    return np.concatenate(parts).astype(slab.dtype)


class Ticket:
    def __init__(self) -> None:
        self.outcome: Any = "waits"

    def answer(self, step: int) -> None:
        self.outcome = step

    def refuse(self, error: errors.ShoalError) -> None:
        self.outcome = type(error).__name__


def do(group: LockGroup, call: tuple[Any, ...]) -> Any:
    """Makes one call to a group, and returns what it answers."""
    try:
        return plain(_do(group, *call))
    except errors.ShoalError as error:
        return type(error).__name__


def _do(group: LockGroup, kind: str, worker: str, step: int, seed: int) -> Any:
    stamp = Stamp(worker, 1, step)
    match kind:
        case "admit":
            return group.admit(worker, 1, WORKERS.index(worker))
        case "pull":
            ticket = Ticket()
            group.pull(ticket, stamp)
            group.abandon(ticket)
            return ticket.outcome
        case "stage" | "push":
            shards = group.select([shard.layout.shard for shard in group.shards])
            wanted = [Aggregation.TRAINABLE, *([Aggregation.SUM] * (seed % 2)), *([Aggregation.MEAN] * (seed % 3 == 0))]
            arrays = {slab: gradient(slab, seed) for slab in shards.layout.carrying(wanted)}
            payload = shards.payload(arrays, BufferPool(0, 0.0))
            staged = group.stage(stamp, 1.0 + seed % 3, max(0, group.version - 1), payload, Cursor(1, seed))
            return (staged, group.commit(stamp)) if kind == "push" else staged
        case "skip":
            return group.stage(stamp, 0.0, group.version, None), group.commit(stamp)
        case "commit":
            return group.commit(stamp)
        case "rate":
            return group.set_learning_rate(optim.ConstantLR(0.5 / (1 + seed)))
        case "fence":
            return group.fence(worker, 1)
        case "release":
            return group.release(worker, 1, step)
        case "cut":
            cut = group.cut({worker: WorkerProgress(1, step, step)}, within_s=0.0)
            for snapshot in cut.snapshots:
                snapshot.end_saving()
            return cut.answer
    raise AssertionError(kind)


def arrays_of(groups: Iterable[LockGroup]) -> Mapping[int, list[bytes]]:
    return {
        shard.layout.shard: [it.tobytes() for arena in shard.arenas for it in (arena.values, *arena.slots.values())]
        for group in groups
        for shard in group.shards
    }


CALLS = st.tuples(
    st.sampled_from(
        ["pull", "push", "push", "push", "stage", "stage", "commit", "skip", "rate", "cut", "release", "fence", "admit"]
    ),
    st.sampled_from(WORKERS),
    st.integers(0, 3),
    st.integers(0, 5),
)
ADMITTED = [("admit", worker, 0, 0) for worker in WORKERS]


@settings(max_examples=draws(40), deadline=None)
@given(
    mode=st.sampled_from(MODES),
    before=st.lists(CALLS, max_size=14),
    after=st.lists(CALLS, max_size=14),
    leave=st.sets(st.integers(1, SHARDS - 1), min_size=1),
    optimizer=st.sampled_from([optim.Adam(0.1), optim.SGD(0.5), optim.Momentum(0.1)]),
)
def test_the_parts_go_on_as_the_whole_group_would(
    mode: consistency.Consistency,
    before: Sequence[tuple[Any, ...]],
    after: Sequence[tuple[Any, ...]],
    leave: set[int],
    optimizer: optim.Optimizer,
) -> None:
    with patch.object(slabs, "SLAB_BYTES", 4 * (LARGE - 1)):
        check_parts(mode, before, after, leave, optimizer)


def check_parts(
    mode: consistency.Consistency,
    before: Sequence[tuple[Any, ...]],
    after: Sequence[tuple[Any, ...]],
    leave: set[int],
    optimizer: optim.Optimizer,
) -> None:
    whole, split = (store_of(config(mode, optimizer)) for _ in range(2))
    (one,), (other,) = whole.hosted.groups_of("job"), split.hosted.groups_of("job")
    for call in [*ADMITTED, *before]:
        assert do(one, call) == do(other, call)
    with patch.object(splittable_group, "QUIET_WAIT_S", 0.0), patch.object(splittable_group, "LOOK_AGAIN_S", 0.0):
        try:
            split.split("job", 1, 0, sorted(leave), 1)
        except errors.Overloaded:  # the open step has contributions
            for worker in WORKERS:
                assert do(one, ("release", worker, 0, 0)) == do(other, ("release", worker, 0, 0))
            split.split("job", 1, 0, sorted(leave), 1)
    parts = split.hosted.groups_of("job")
    assert [it.number for it in parts] == [0, min(leave)]
    assert arrays_of(parts) == arrays_of([one])
    for call in after:
        expected = do(one, call)
        assert [do(part, call) for part in parts] == [expected, expected], call
    assert arrays_of(parts) == arrays_of([one])
    for part in parts:
        assert plain(part.progress()) == plain(one.progress())


def test_a_call_for_all_groups_is_repeated_when_one_has_moved() -> None:
    store = store_of(config(consistency.Asynchronous()))
    store.split("job", 1, 0, [1], 3)
    calls: list[list[int]] = []

    def call(groups: Sequence[LockGroup]) -> int:
        calls.append([group.number for group in groups])
        if len(calls) == 1:  # the coordinator frees the copy of a primary that has handed over
            store.drop_copy("job", 1, 1, 4)
        return max(group.admit("a", 1, 0) for group in groups)

    assert store.hosted.on_groups("job", call) == 0
    assert calls[0] == [0, 1]
    assert calls[-1] == [0]


def test_a_split_that_nobody_waits_for_is_not_made() -> None:
    """Nobody would tell the workers of the new groups."""
    store = store_of(config(consistency.Synchronous()))
    group = store.hosted.group("job", 1)
    for rank, worker in enumerate(("a", "b")):
        group.admit(worker, 1, rank)
    do(group, ("push", "a", 0, 1))  # the open step has a contribution
    with pytest.raises(errors.Cancelled):
        store.split("job", 1, 0, [1], 3, lambda: False)
    do(group, ("push", "b", 0, 2))
    assert store.hosted.group("job", 1) is group
    store.split("job", 1, 0, [1], 3)
    assert [it.number for it in store.hosted.groups_of("job")] == [0, 1]
