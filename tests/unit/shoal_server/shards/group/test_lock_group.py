"""Lock group: one version for all shards, requests that name some shards, and failures of updates and answers."""

import dataclasses
import itertools
import re
import weakref
from typing import Any

import numpy as np
import pytest

from shoal import consistency, errors, initializers, optim
from shoal._memory.buffers import BufferPool
from shoal._wire.layout import ArenaLayout, ShardLayout, Slice
from shoal._wire.limits import MAX_LEAD, MAX_STEP
from shoal.variables import Variable
from shoal_server.shards.group.lock_group import LockGroup
from shoal_server.shards.store import ShardStore
from shoal_server.shards.values.shard import JobShardConfig, Stamp
from shoal_server.shards.values.stored_slab import StoredSlab

SHARDS = 4


def layouts(count: int = SHARDS) -> list[ShardLayout]:
    spec = Variable((2,))
    return [
        ShardLayout(n, (ArenaLayout(spec.dtype, spec.aggregation, (Slice(f"v{n}", 0, 2, 0),), 2),))
        for n in range(count)
    ]


def config(mode: consistency.Consistency | None = None, generation: int = 1) -> JobShardConfig:
    variables = {f"v{n}": Variable((2,), initializer=initializers.Zeros()) for n in range(SHARDS)}
    return JobShardConfig("job", generation, variables, optim.SGD(1.0), mode or consistency.Asynchronous(), 0)


def group_of(mode: consistency.Consistency | None = None, workers: str = "a") -> LockGroup:
    group = LockGroup(config(mode), layouts())
    for rank, worker in enumerate(workers):
        group.admit(worker, 1, rank)
    return group


def push(group: LockGroup, worker: str, step: int) -> None:
    stamp = Stamp(worker, 1, step)
    shards = group.select(range(SHARDS))
    gradients = {slab: np.full(slab.elements, -1.0, np.float32) for slab in shards.layout.slabs}
    group.stage(stamp, 1.0, group.version, shards.payload(gradients, BufferPool(0, 0.0)))
    group.commit(stamp)


def clipped(mode: consistency.Consistency, gradients: list[tuple[float, float]]) -> np.ndarray:
    """The change of all values when each worker pushes one gradient (value, weight), and SGD(1) clips to the norm 3."""
    groups = (optim.VariableGroup("v0", frozen=True),)
    group = LockGroup(
        dataclasses.replace(config(mode), optimizer=optim.SGD(1.0, clip_norm=3.0, groups=groups)), layouts()
    )
    for rank in range(len(gradients)):
        group.admit(f"w{rank}", 1, rank)
    shards = group.select(range(SHARDS))
    for rank, (value, weight) in enumerate(gradients):
        pushed = {slab: np.full(slab.elements, value, np.float32) for slab in shards.layout.slabs}
        stamp = Stamp(f"w{rank}", 1, 0)
        group.stage(stamp, weight, group.version, shards.payload(pushed, BufferPool(0, 0.0)))
        group.commit(stamp)
    return np.concatenate([arena.values for shard in group.shards for arena in shard.arenas])


def test_a_learning_rate_counts_from_the_next_update_on() -> None:
    group = group_of(workers="a")
    push(group, "a", 0)
    group.set_learning_rate(optim.PiecewiseLR(0.5, (2,), (0.25,)))
    values = group.shards[0].arenas[0].values
    for step in (1, 2):
        push(group, "a", step)
    assert values.tolist() == [1.75, 1.75]  # 1, then 0.5 at version 1, and 0.25 at version 2


def test_a_gradient_is_clipped_to_its_norm_over_all_shards() -> None:
    """6 of the 8 values are not frozen, so a gradient of ones has the norm 6 ** 0.5."""
    limit = 3.0 / 6**0.5
    asynchronous = clipped(consistency.Asynchronous(), [(5.0, 1.0), (0.5, 1.0), (-4.0, 1.0)])
    np.testing.assert_allclose(asynchronous, [0, 0, *[-limit - 0.5 + limit] * 6], rtol=1e-5, atol=1e-6)
    below = clipped(consistency.Synchronous(), [(5.0, 1.0), (-1.0, 3.0)])  # the mean is 0.5
    np.testing.assert_allclose(below, [0, 0, *[-0.5] * 6], rtol=1e-6)
    above = clipped(consistency.Synchronous(), [(5.0, 3.0), (1.0, 1.0)])
    np.testing.assert_allclose(above, [0, 0, *[-limit] * 6], rtol=1e-5)


class Ticket:
    """Keeps its answer; raises instead if it is told to."""

    def __init__(self, *, raises: bool = False) -> None:
        self.raises, self.step, self.granted = raises, -1, False
        self.error: errors.ShoalError | None = None

    def answer(self, step: int) -> None:
        if self.raises:
            raise RuntimeError("cannot schedule new futures after shutdown")
        self.step = step

    def grant(self, *, wanted: bool) -> None:
        self.granted = wanted

    def refuse(self, error: errors.ShoalError) -> None:
        self.error = error
        if self.raises:
            raise RuntimeError("cannot schedule new futures after shutdown")


def test_one_push_updates_all_shards_to_one_version() -> None:
    group = group_of()
    push(group, "a", 0)
    with group.read(group.select(range(SHARDS))) as reading:
        assert reading.version == 1
        np.testing.assert_array_equal(reading.values, [[1] * 2 * SHARDS])


def test_a_reader_reads_some_shards_in_its_order() -> None:
    group = group_of()
    some = group.select([2, 0])
    (slab,) = some.layout.slabs
    assert slab.keys == ((2, 0), (0, 0))
    group.assign(some, {slab: np.array([20, 21, 0, 1], np.float32)})
    with group.read(group.select(range(SHARDS))) as everything:
        np.testing.assert_array_equal(everything.values, [[0, 1, 0, 0, 20, 21, 0, 0]])
    with group.read(some) as reading:
        push(group, "a", 0)
        np.testing.assert_array_equal(reading.values, [[20, 21, 0, 1]])
    with group.read(some) as later:
        np.testing.assert_array_equal(later.values, [[21, 22, 1, 2]])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]])
def test_a_push_may_name_the_shards_in_any_order(order: list[int]) -> None:
    group = group_of()
    shards = group.select(order)
    (slab,) = shards.layout.slabs
    gradient = np.repeat(np.array(order, np.float32), 2)
    payload = shards.payload({slab: gradient}, BufferPool(0, 0.0))
    assert (payload[0] is gradient) == (order == [0, 1, 2, 3]), "copied only if it must be"
    group.stage(Stamp("a", 1, 0), 1.0, 0, payload)
    group.commit(Stamp("a", 1, 0))
    with group.read(shards) as reading:
        np.testing.assert_array_equal(reading.values[0], -gradient)
    assert [[*shard.arenas[0].values] for shard in group.shards] == [[-n, -n] for n in range(SHARDS)]


def test_shards_that_were_added_are_read_and_pushed_with_the_others() -> None:
    group = LockGroup(config(), layouts(2))
    group.assign(some := group.select([0, 1]), {some.layout.slabs[0]: np.ones(4, np.float32)})
    group.add(layouts())
    shards = group.select(range(SHARDS))
    (slab,) = shards.layout.slabs
    group.admit("a", 1, 0)
    group.stage(Stamp("a", 1, 0), 1.0, 0, shards.payload({slab: np.arange(8, dtype=np.float32)}, BufferPool(0, 0.0)))
    group.commit(Stamp("a", 1, 0))
    with group.read(shards) as reading:
        np.testing.assert_array_equal(reading.values, [[1, 0, -1, -2, -4, -5, -6, -7]])


def test_a_selection_is_prepared_once_and_a_bounded_number_is_kept() -> None:
    group = group_of()
    assert group.select([0, 1]) is group.select([0, 1])
    assert group.select(range(SHARDS)).whole
    assert not group.select([0, 1]).whole
    made = [weakref.ref(group.select(three)) for three in itertools.permutations(range(SHARDS), 3)]
    assert 0 < sum(selection() is not None for selection in made) <= 16 < len(made)


@pytest.mark.parametrize(
    ("indices", "error"), [([], errors.BadRequest), ([0, 0], errors.BadRequest), ([9], errors.UnknownShard)]
)
def test_a_selection_that_makes_no_sense(indices: list[int], error: type[errors.ShoalError]) -> None:
    with pytest.raises(error):
        group_of().select(indices)


def test_a_worker_that_names_a_part_is_told_to_name_all() -> None:
    with pytest.raises(errors.BadRequest, match="a worker's push names 2 of the 4 shards of job"):
        group_of().select([1, 2]).check_whole("push")


def test_a_pull_whose_answer_raises_keeps_nobody_from_waking() -> None:
    group = group_of(consistency.Synchronous(), "ab")
    push(group, "a", 0)
    bad, good = Ticket(raises=True), Ticket()
    for ticket in (bad, good):
        group.pull(ticket, Stamp("a", 1, 1))
    push(group, "b", 0)  # neither fails
    assert good.step == 1
    assert isinstance(bad.error, errors.InternalError)


def fail(monkeypatch: pytest.MonkeyPatch, method: str, allowed: int = 0) -> None:
    """Lets this method of slabs raise after this number of calls."""
    real, numbers = getattr(StoredSlab, method), itertools.count()

    def replacement(*args: Any, **more: Any) -> None:
        if next(numbers) >= allowed:
            raise MemoryError("no memory for 8 GiB")
        real(*args, **more)

    monkeypatch.setattr(StoredSlab, method, replacement)


@pytest.fixture
def separate_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives each shard a slab of its own."""
    monkeypatch.setattr("shoal._wire.slabs.SLAB_BYTES", 1)


FAILED = "an update of job job failed on this server.*MemoryError: no memory for 8 GiB"


@pytest.mark.usefixtures("separate_slabs")
def test_a_failed_update_answers_the_pulls_that_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(consistency.Synchronous(), "ab")
    push(group, "a", 0)
    released, waiting = Ticket(), Ticket()
    group.pull(released, Stamp("a", 1, 1))
    group.pull(waiting, Stamp("a", 1, 2))
    fail(monkeypatch, "apply", allowed=SHARDS - 1)
    with pytest.raises(errors.InternalError, match=FAILED):
        push(group, "b", 0)
    for ticket in (released, waiting):
        assert ticket.step == -1
        assert isinstance(ticket.error, errors.InternalError)
        assert re.search(FAILED, ticket.error.message)


def test_later_calls_after_a_failed_update_name_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(consistency.Asynchronous(), "ab")
    fail(monkeypatch, "apply")
    with pytest.raises(errors.InternalError, match=FAILED):
        push(group, "a", 0)
    with pytest.raises(errors.InternalError, match=FAILED):
        group.pull(Ticket(), Stamp("b", 1, 0))
    with pytest.raises(errors.InternalError, match=FAILED):
        push(group, "b", 0)
    with pytest.raises(errors.InternalError, match=FAILED):
        group.read(group.select(range(SHARDS)))
    group.close()
    with group.commit_gate.passing(set()):  # it does not hold anybody back
        pass


@pytest.mark.usefixtures("separate_slabs")
@pytest.mark.parametrize("allowed", [0, SHARDS - 1])
def test_a_failed_fold_answers_the_pulls_that_wait_for_it(monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
    group = group_of(consistency.Synchronous(), "abc")
    push(group, "a", 0)
    waiting = Ticket()
    group.pull(waiting, Stamp("a", 1, 1))
    fail(monkeypatch, "fold", allowed=allowed)
    with pytest.raises(errors.InternalError, match=FAILED):
        push(group, "b", 0)
    assert isinstance(waiting.error, errors.InternalError)
    assert re.search(FAILED, waiting.error.message)


def test_a_failed_update_answers_the_pushes_that_wait_for_a_permit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_server.shards.machine.consistency.PERMIT_FREE_BYTES", 0)
    monkeypatch.setattr("shoal_server.shards.machine.consistency.FREE_BYTES", 0)
    group = group_of(consistency.Synchronous(), "abcdefghijklmnop")
    tickets = [Ticket() for _ in range(15)]
    for ticket, worker in zip(tickets, "bcdefghijklmnop", strict=True):
        group.open_push(ticket, Stamp(worker, 1, 0))
    assert not tickets[-1].granted
    fail(monkeypatch, "fold")
    with pytest.raises(errors.InternalError, match=FAILED):
        push(group, "a", 0)
    assert isinstance(tickets[-1].error, errors.InternalError)


def test_a_pull_whose_refusal_raises_keeps_nobody_from_being_refused() -> None:
    group = group_of(consistency.Synchronous(), "ab")
    push(group, "a", 0)
    bad, good = Ticket(raises=True), Ticket()
    for ticket in (bad, good):
        group.pull(ticket, Stamp("a", 1, 1))
    group.close()
    assert isinstance(good.error, errors.UnknownJob)


@pytest.mark.parametrize("step", [MAX_STEP - 1, MAX_STEP, (1 << 64) - 1])
def test_a_push_at_the_edge_of_the_steps_changes_nothing(step: int) -> None:
    group = group_of()
    with pytest.raises(errors.BadRequest, match=f"step {step} is out of range; the limit MAX_STEP - 1 is"):
        push(group, "a", step)
    assert group.version == 0
    push(group, "a", 0)
    assert group.version == 1


@pytest.mark.parametrize(
    "mode", [consistency.Asynchronous(), consistency.BoundedStaleness(1), consistency.Synchronous()], ids=str
)
def test_a_worker_far_ahead_of_all_others_is_refused_and_newcomers_begin_where_they_did(
    mode: consistency.Consistency,
) -> None:
    """Without the limit, the newcomers of an asynchronous job would begin at a step that they cannot push."""
    group = group_of(mode)
    push(group, "a", 0)
    for step in (MAX_STEP - 2, MAX_LEAD + 2):
        with pytest.raises(errors.BadRequest, match=f"step {step} is .* ahead .*; the limit MAX_LEAD is {MAX_LEAD}"):
            group.pull(Ticket(), Stamp("a", 1, step))
        with pytest.raises(errors.BadRequest, match=f"step {step} is .* ahead .*; the limit MAX_LEAD is {MAX_LEAD}"):
            push(group, "a", step)
    assert group.admit("b", 1, 1) <= 1
    group.pull(Ticket(), Stamp("b", 1, 1 + MAX_LEAD))


def test_a_store_adds_shards_before_training_and_refuses_them_after() -> None:
    store = ShardStore()
    store.create(config(), layouts(2))
    store.create(config(), layouts())  # as a repetition does, with two more
    group = store.hosted.group("job", 1)
    assert len(group.shards) == SHARDS
    group.admit("a", 1, 0)
    store.create(config(), layouts())
    late = ShardLayout(SHARDS, layouts(1)[0].arenas)
    with pytest.raises(errors.BadRequest, match="training has begun"):
        store.create(config(), [late])


def test_a_store_refuses_shards_of_variables_that_the_job_did_not_have() -> None:
    store = ShardStore()
    store.create(config(), layouts(2))
    arena = layouts(1)[0].arenas[0]
    others = dataclasses.replace(arena, slices=tuple(it._replace(variable="other") for it in arena.slices))
    with pytest.raises(errors.BadRequest, match="job has no variables other at generation 1"):
        store.create(config(), [ShardLayout(SHARDS, (others,))])


def test_a_later_generation_replaces_the_group() -> None:
    store = ShardStore()
    store.create(config(consistency.Synchronous()), layouts())
    old = store.hosted.group("job", 1)
    old.admit("a", 1, 0)
    ticket = Ticket()
    push_later = Stamp("a", 1, 1)
    old.admit("b", 1, 1)
    push(old, "a", 0)
    old.pull(ticket, push_later)
    store.create(config(generation=2), layouts())
    assert isinstance(ticket.error, errors.UnknownJob)
    with pytest.raises(errors.StaleGeneration):
        store.hosted.group("job", 1)
    with pytest.raises(errors.StaleGeneration):
        store.create(config(), layouts())
