"""Folding: each gradient is added to its step's sum as it arrives, with the same bits as a sum when the step closes."""

import math
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import consistency, errors, initializers, optim
from shoal._wire.layout import ArenaLayout, ShardLayout, Slice
from shoal.variables import Variable
from shoal_server.optimizers import kernels, update_rules
from shoal_server.shards.group.lock_group import LockGroup
from shoal_server.shards.machine.consistency import mode_for
from shoal_server.shards.machine.events import (
    AnswerAdmission,
    AnswerCut,
    AnswerPulls,
    AnswerPush,
    CutRequested,
    FoldsDone,
    LockGroupEffect,
    PullRequested,
    PushCommitted,
    PushStaged,
    WorkerAdmitted,
    WorkerReleased,
)
from shoal_server.shards.machine.mode import Apply, Fold
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.values.shard import JobShardConfig, Stamp
from support.run_lengths import draws

SIZE = 24
VARIABLES = {
    "w": Variable((SIZE,), initializer=initializers.Zeros()),
    "total": Variable((SIZE,), initializer=initializers.Constant(0.1), trainable=False, aggregation="sum"),
    "count": Variable((SIZE,), "int64", initializers.Zeros(), trainable=False, aggregation="sum"),
    "mean": Variable((SIZE,), initializer=initializers.Zeros(), trainable=False, aggregation="mean"),
    "last": Variable((SIZE,), initializer=initializers.Zeros(), trainable=False, aggregation="last"),
}
NAMES = [*VARIABLES]


def group_of(workers: int, mode: consistency.Consistency | None = None, names: Sequence[str] = NAMES) -> LockGroup:
    variables = {name: VARIABLES[name] for name in names}
    arenas = [ArenaLayout(v.dtype, v.aggregation, (Slice(name, 0, SIZE, 0),), SIZE) for name, v in variables.items()]
    config = JobShardConfig("job", 1, variables, optim.SGD(1.0), mode or consistency.Synchronous(), 0)
    group = LockGroup(config, [ShardLayout(0, tuple(arenas))])
    for rank in range(workers):
        group.admit(f"w{rank}", rank + 1, rank)
    return group


def stamp(rank: int, step: int = 0) -> Stamp:
    return Stamp(f"w{rank}", rank + 1, step)


def push(group: LockGroup, rank: int, arrays: Mapping[str, np.ndarray] | None, weight: float = 1.0) -> None:
    payload = None
    if arrays is not None:
        payload = {NAMES.index(name): array.copy() for name, array in arrays.items()}  # a slab for each
    group.stage(stamp(rank), weight if arrays is not None else 0.0, 0, payload)
    group.commit(stamp(rank))


def values_of(group: LockGroup) -> list[np.ndarray]:
    with group.read(group.select([0])) as reading:
        return [array.copy() for array in reading.values]


def mean_at_the_close(pushed: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """The mean as servers computed it when they kept all contributions until the close."""
    total = pushed[0].copy()
    if len(pushed) == 1:
        return total
    if len(set(weights)) == 1:
        bits = (len(pushed) - 1).bit_length()
        share = math.ldexp(1.0, -bits)
        kernels.accumulate(total, pushed[1], share, both=True)
        for gradient in pushed[2:]:
            kernels.accumulate(total, gradient, share)
        if len(pushed) != 1 << bits:
            kernels.scale(total, math.ldexp(float(total.dtype.type(1.0 / len(pushed))), bits))
        return total
    largest = max(weights)
    relative = [weight / largest for weight in weights]
    shares = [weight / sum(relative) for weight in relative]
    kernels.scale(total, shares[0])
    for gradient, each in zip(pushed[1:], shares[1:], strict=True):
        kernels.accumulate(total, gradient, each)
    return total


def at_the_close(contributions: Sequence[Mapping[str, np.ndarray]], weights: Sequence[float]) -> list[np.ndarray]:
    """The values of all variables after one step of SGD with the rate 1, as servers computed them at the close."""
    values = values_of(group_of(0))
    for index, name in enumerate(NAMES):
        brought = [(each[name], weight) for each, weight in zip(contributions, weights, strict=True) if name in each]
        if not brought:
            continue
        arrays, amounts = [array for array, _ in brought], [weight for _, weight in brought]
        if name == "w":
            values[index] -= mean_at_the_close(arrays, amounts)
        else:
            update_rules.aggregate(values[index], arrays, amounts, VARIABLES[name].aggregation)
    return values


def drawn_arrays(seed: int, spread: int, names: Sequence[str] = NAMES) -> dict[str, np.ndarray]:
    """Arrays whose elements have decimal exponents up to `spread`; some are 0, or the largest finite number."""
    draws = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for name in names:
        dtype = VARIABLES[name].dtype
        if dtype == "int64":
            arrays[name] = draws.integers(-(2**62), 2**62, SIZE)
            continue
        wide = draws.standard_normal(SIZE) * 10.0 ** draws.integers(-spread, min(spread, 30), SIZE)
        array = wide.astype(np.float32)
        if name == "w":
            array[draws.integers(0, SIZE, 3)] = draws.choice(np.array([0.0, 3.4028235e38, -3e38], np.float32), 3)
        arrays[name] = array
    return arrays


@st.composite
def push_orders(draw: st.DrawFn) -> tuple[list[int], list[bool], int, int]:
    """An order of arrival, which ranks skip the step, a seed, and the spread of the exponents."""
    workers = draw(st.integers(1, 12))
    order = draw(st.permutations(range(workers)))
    skips = draw(st.lists(st.booleans(), min_size=workers, max_size=workers) | st.just([False] * workers))
    # If all contribute, the bits agree down to the smallest numbers.
    spread = draw(st.sampled_from([25] if any(skips) else [25, 44]))
    return list(order), skips, draw(st.integers(0, 2**32 - 1)), spread


@given(push_orders(), st.sampled_from([1.0, 7.0, 1e-300, 1e300]), st.data())
@settings(max_examples=draws(40), deadline=None)
def test_equal_weights_have_the_bits_of_a_sum_at_the_close_in_any_order(
    drawn: tuple[list[int], list[bool], int, int], weight: float, data: st.DataObject
) -> None:
    order, skips, seed, spread = drawn
    some = st.sets(st.sampled_from(NAMES[1:])).map(lambda updates: ["w", *sorted(updates)])
    arrays = {rank: drawn_arrays(seed + rank, spread, data.draw(some)) for rank in order if not skips[rank]}
    group = group_of(len(order))
    for rank in order:
        push(group, rank, arrays.get(rank), weight)
    with np.errstate(over="ignore"):
        expected = at_the_close([arrays[rank] for rank in sorted(arrays)], [weight] * len(arrays))
    assert group.version == bool(arrays)
    for got, wanted in zip(values_of(group), expected, strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), wanted.view(np.uint8))


@given(push_orders(), st.data())
@settings(max_examples=draws(30), deadline=None)
def test_unequal_weights_have_the_same_bits_in_any_order(
    drawn: tuple[list[int], list[bool], int, int], data: st.DataObject
) -> None:
    order, skips, seed, _ = drawn
    weights = {rank: data.draw(st.sampled_from([1.0, 32.0, 20.0, 3.7, 1e6])) for rank in order if not skips[rank]}
    arrays = {rank: drawn_arrays(seed + rank, 25, ["w"]) for rank in weights}
    results = []
    for sequence in (order, sorted(order)):
        group = group_of(len(order), names=["w"])
        for rank in sequence:
            push(group, rank, arrays.get(rank), weights.get(rank, 0.0))
        results.append(values_of(group)[0])
    np.testing.assert_array_equal(results[0].view(np.uint8), results[1].view(np.uint8))
    if arrays:
        doubles = [arrays[rank]["w"].astype(np.float64) for rank in weights]
        expected = -np.average(doubles, axis=0, weights=[*weights.values()])
        scale = np.max(np.abs(doubles), axis=0)
        assert np.all(np.abs(results[0] - expected) <= 1e-5 * scale)
        assert np.all(np.isfinite(results[0]))


class Counted(np.ndarray):
    """An array of which weak references are counted."""


def held_after_each(order: Sequence[int]) -> list[int]:
    """Gradients in memory after each push, in this order of arrival, before the step closes."""
    group = group_of(len(order), names=["w"])
    alive: list[weakref.ref[Any]] = []
    counts = []
    for rank in order[:-1]:
        gradient = np.full(SIZE, 1.0, np.float32).view(Counted)
        alive.append(weakref.ref(gradient))
        payload: dict[int, np.ndarray] = {0: gradient}
        del gradient
        group.stage(stamp(rank), 1.0, 0, payload)
        group.commit(stamp(rank))
        del payload
        counts.append(sum(each() is not None for each in alive))
    return counts


def test_a_step_in_order_of_rank_keeps_one_gradient() -> None:
    assert max(held_after_each(range(64))) == 1


def test_a_gap_keeps_only_the_gradients_after_it() -> None:
    assert held_after_each([0, 1, 3, 4, 2, 5, 6]) == [1, 1, 2, 3, 1, 1]


def hold_folds(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Holds each fold from now on: the first event says that one has begun, and setting the second lets them end."""
    began, may_end = threading.Event(), threading.Event()
    accumulate: Callable[..., None] = kernels.accumulate

    def slow(*args: Any, **kwargs: Any) -> None:
        began.set()
        assert may_end.wait(30)
        accumulate(*args, **kwargs)

    monkeypatch.setattr(kernels, "accumulate", slow)
    return began, may_end


def test_a_fold_runs_without_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end = hold_folds(monkeypatch)
    group = group_of(3, names=["w"])
    gradient = {"w": np.ones(SIZE, np.float32)}
    push(group, 0, gradient)
    folding = threading.Thread(target=push, args=(group, 1, gradient))
    folding.start()
    try:
        assert began.wait(30)
        assert group.version == 0  # takes the lock
        group.stage(stamp(2), 1.0, 0, {0: np.ones(SIZE, np.float32)})
        assert group.progress()["w1"].committed == 1
    finally:
        may_end.set()
        folding.join()
    group.commit(stamp(2))
    np.testing.assert_array_equal(values_of(group)[0], -1)


def test_the_close_waits_for_a_fold_that_another_thread_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    group = group_of(3, names=["w"])
    push(group, 0, {"w": np.full(SIZE, 1.0, np.float32)})
    began, may_end = hold_folds(monkeypatch)
    threads = [
        threading.Thread(target=push, args=(group, rank, {"w": np.full(SIZE, 1.0 + rank, np.float32)}))
        for rank in (1, 2)
    ]
    threads[0].start()
    assert began.wait(30)
    threads[1].start()
    may_end.set()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(values_of(group)[0], -2)


def test_what_the_last_push_releases_is_folded_without_the_lock_too(monkeypatch: pytest.MonkeyPatch) -> None:
    began, may_end = hold_folds(monkeypatch)
    group = group_of(4, names=["w"])
    arrays = [drawn_arrays(rank, 20, ["w"]) for rank in range(4)]
    for rank in (1, 2, 3):
        push(group, rank, arrays[rank])
    last = threading.Thread(target=push, args=(group, 0, arrays[0]))
    last.start()
    try:
        assert began.wait(30)
        assert group.version == 0
        assert group.progress()["w0"].committed == 1
        assert group.admit("w4", 5, 4) == 1, "the step is sealed"
    finally:
        may_end.set()
        last.join()
    assert group.version == 1
    np.testing.assert_array_equal(values_of(group)[0], -mean_at_the_close([each["w"] for each in arrays], [1.0] * 4))


def test_a_fold_that_fails_closes_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError

    group = group_of(3, names=["w"])
    gradient = {"w": np.ones(SIZE, np.float32)}
    push(group, 0, gradient)
    with monkeypatch.context() as patched:
        patched.setattr(kernels, "accumulate", failing)
        with pytest.raises(errors.InternalError, match="MemoryError"):
            push(group, 1, gradient)
    with pytest.raises(errors.InternalError, match="MemoryError"):
        push(group, 2, gradient)


def test_a_cut_between_two_folds_saves_the_values_before_the_step() -> None:
    group = group_of(3, names=["w"])
    arrays = [drawn_arrays(rank, 20, ["w"]) for rank in range(3)]
    push(group, 0, arrays[0])
    push(group, 1, arrays[1])
    cut = group.cut(group.progress())
    assert (cut.answer.version, cut.answer.step) == (0, 0)
    push(group, 2, arrays[2])
    (saved,) = cut.snapshots
    np.testing.assert_array_equal(saved.values[0], 0)
    saved.end_saving()
    np.testing.assert_array_equal(values_of(group)[0], -mean_at_the_close([each["w"] for each in arrays], [1.0] * 3))


def test_a_worker_that_dies_before_it_contributes_lets_the_others_be_folded() -> None:
    group = group_of(4, names=["w"])
    arrays = [drawn_arrays(rank, 20, ["w"]) for rank in range(4)]
    for rank in (1, 2):
        push(group, rank, arrays[rank])
    group.release("w0", 1, 0)
    push(group, 3, arrays[3])
    expected = mean_at_the_close([each["w"] for each in arrays[1:]], [1.0] * 3)
    np.testing.assert_array_equal(values_of(group)[0], -expected)


# The state machine.


def state_of(workers: int, backup_workers: int = 0) -> GroupState:
    state = GroupState("job", mode_for(consistency.Synchronous(backup_workers)))
    for rank in range(workers):
        state.handle(WorkerAdmitted(f"w{rank}", rank + 1, rank))
    return state


def commit(state: GroupState, rank: int, step: int = 0) -> list[LockGroupEffect]:
    state.handle(PushStaged(f"w{rank}", rank + 1, step, 1.0, 0, f"g{rank}"))
    effects = state.handle(PushCommitted(f"w{rank}", rank + 1, step))
    state.validate()
    return effects


def folded(effects: Sequence[LockGroupEffect]) -> list[str]:
    return [part.payload for effect in effects if isinstance(effect, Fold) for part in effect.contributions]


def applied(effects: Sequence[LockGroupEffect]) -> list[tuple[list[str], int]]:
    return [
        ([part.payload for part in effect.contributions], effect.folded)
        for effect in effects
        if isinstance(effect, Apply)
    ]


def test_the_prefix_of_consecutive_ranks_is_folded_as_it_comes() -> None:
    state = state_of(5)
    assert folded(commit(state, 0)) == ["g0"]
    assert folded(commit(state, 3)) == []
    assert folded(commit(state, 2)) == []
    assert folded(commit(state, 1)) == ["g1", "g2", "g3"]
    assert applied(commit(state, 4)) == [(["g0", "g1", "g2", "g3", "g4"], 4)]
    assert folded(commit(state, 0, 1)) == ["g0"], "a new step begins a new sum"


def test_a_backup_worker_that_may_still_come_stops_the_folds() -> None:
    state = state_of(4, backup_workers=1)
    assert folded(commit(state, 1)) == []
    assert folded(commit(state, 2)) == []
    assert applied(commit(state, 3)) == [(["g1", "g2", "g3"], 0)]


def test_a_sealed_step_drops_what_comes_later_and_closes_when_all_is_folded() -> None:
    state = state_of(3, backup_workers=1)
    commit(state, 2)
    state.handle(PushStaged("w1", 2, 0, 1.0, 0, "g1"))
    effects = state.handle(PushCommitted("w1", 2, 0, defers=True))
    assert (folded(effects), applied(effects)) == (["g1", "g2"], [])
    (answer,) = [effect for effect in effects if isinstance(effect, AnswerPush)]
    assert (answer.outcome, answer.step, answer.version) == ("accepted", 1, 1)
    assert state.handle(PushCommitted("w1", 2, 0)) == [answer]
    assert state.handle(PullRequested("t", "w1", 2, 1)) == [], "the step's update is not applied yet"
    late = commit(state, 0)
    assert [effect.outcome for effect in late if isinstance(effect, AnswerPush)] == ["dropped_late"]
    assert applied(late) == []
    closed = state.handle(FoldsDone())
    state.validate()
    assert applied(closed) == [(["g1", "g2"], 2)]
    assert any(isinstance(effect, AnswerPulls) for effect in closed)
    assert state.handle(FoldsDone()) == []


def test_a_cut_closes_a_sealed_step() -> None:
    state = state_of(2)
    commit(state, 1)
    state.handle(PushStaged("w0", 1, 0, 1.0, 0, "g0"))
    assert applied(state.handle(PushCommitted("w0", 1, 0, defers=True))) == []
    effects = state.handle(CutRequested(state.progress()))
    assert applied(effects) == [(["g0", "g1"], 2)]
    assert isinstance(effects[-1], AnswerCut)
    assert (effects[-1].version, effects[-1].step) == (1, 1)


def test_a_worker_that_joins_before_the_folded_ranks_begins_with_the_next_step() -> None:
    state = state_of(3)
    state.handle(WorkerReleased("w0", 1, 0))
    assert folded(commit(state, 1)) == ["g1"]
    assert state.handle(WorkerAdmitted("w0", 9, 0)) == [AnswerAdmission(1)]
    assert state.handle(WorkerAdmitted("w0", 9, 0)) == [AnswerAdmission(1)]  # repeated
    state.validate()
    assert applied(commit(state, 2)) == [(["g1", "g2"], 1)]
    assert [type(effect).__name__ for effect in state.handle(PullRequested("t", "w0", 9, 1))] == ["AnswerPulls"]


def test_a_worker_that_joins_behind_the_folded_ranks_takes_part_in_the_open_step() -> None:
    state = state_of(3)
    assert folded(commit(state, 0)) == ["g0"]
    assert state.handle(WorkerAdmitted("w3", 4, 3)) == [AnswerAdmission(0)]
    commit(state, 1)
    assert applied(commit(state, 2)) == []
    assert applied(commit(state, 3)) == [(["g0", "g1", "g2", "g3"], 3)]


def test_a_worker_that_begins_with_the_next_step_is_no_backup_of_the_open_one() -> None:
    state = state_of(3, backup_workers=1)
    state.handle(WorkerReleased("w0", 1, 0))
    assert folded(commit(state, 1)) == ["g1"]
    assert state.handle(WorkerAdmitted("w0", 9, 0)) == [AnswerAdmission(1)], "the step needs two contributions"
    assert applied(commit(state, 2)) == [(["g1", "g2"], 1)]
