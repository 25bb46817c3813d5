"""Strategies of one process: their replicas, variables, gradients and errors."""

import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from shoal import errors, optim
from shoal_distribute import (
    CentralStorageStrategy,
    CrossDeviceOps,
    DistributedVariable,
    HierarchicalCopyAllReduce,
    MirroredStrategy,
    NcclAllReduce,
    OneDeviceStrategy,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
    RingAllReduce,
    Strategy,
    get_replica_context,
    get_strategy,
    has_strategy,
    in_cross_replica_context,
    keras,
)
from shoal_distribute.strategies import DefaultStrategy, OptimizerStates

MAKERS: dict[str, Callable[[], Strategy]] = {
    "default": DefaultStrategy,
    "one device": lambda: OneDeviceStrategy("/cpu:0"),
    "mirrored 1": lambda: MirroredStrategy(["/cpu:0"]),
    "ring 2": lambda: MirroredStrategy(["/cpu:0", "/cpu:1"], RingAllReduce()),
    "ring 3": lambda: MirroredStrategy(["/cpu:0", "/cpu:1", "/cpu:2"]),
    "hierarchical 4": lambda: MirroredStrategy([f"/cpu:{it}" for it in range(4)], HierarchicalCopyAllReduce()),
    "hierarchical 5": lambda: MirroredStrategy(
        [f"/cpu:{it}" for it in range(5)], HierarchicalCopyAllReduce(num_packs=2)
    ),
    "one device 3": lambda: MirroredStrategy(["/cpu:0", "/cpu:1", "/cpu:2"], ReductionToOneDevice("/cpu:1")),
    "central 1": lambda: CentralStorageStrategy(["/cpu:0"]),
    "central 3": lambda: CentralStorageStrategy(["/cpu:0", "/cpu:1", "/cpu:2"]),
}
SAMPLES, FEATURES, STEPS = 60, 4, 30


@pytest.fixture(params=MAKERS)
def strategy(request: pytest.FixtureRequest) -> Iterator[Strategy]:
    made = MAKERS[request.param]()
    yield made
    made.close()


@pytest.fixture
def two() -> Iterator[MirroredStrategy]:
    made = MirroredStrategy(["/cpu:0", "/cpu:1"])
    yield made
    made.close()


def squares(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(SAMPLES, FEATURES)), rng.normal(size=SAMPLES), rng.normal(size=FEATURES)


def divided(strategy: Strategy, *arrays: np.ndarray) -> tuple[PerReplica, ...]:
    return tuple(PerReplica(np.array_split(it, strategy.local_replicas)) for it in arrays)


def train(
    strategy: Strategy, optimizer: optim.Optimizer
) -> tuple[DistributedVariable, DistributedVariable, list[float]]:
    """Trains least squares for some steps; returns the weights, the bias and the losses."""
    x, y, start = squares()
    weights, bias = strategy.create_variable("w", start), strategy.create_variable("b", np.zeros(()))

    def step(x: np.ndarray, y: np.ndarray) -> float:
        error = x @ weights.read() + bias.read() - y
        strategy.apply_gradients(
            optimizer, [(2 * x.T @ error / SAMPLES, weights), (np.asarray(2 * error.sum() / SAMPLES), bias)]
        )
        return float((error**2).sum() / SAMPLES)

    losses = [strategy.reduce(ReduceOp.SUM, strategy.run(step, divided(strategy, x, y))) for _ in range(STEPS)]
    return weights, bias, losses


@pytest.mark.parametrize("optimizer", [optim.Momentum(0.05), optim.Adam(0.05, clip_norm=1.0)], ids=repr)
def test_every_strategy_equals_one_process(strategy: Strategy, optimizer: optim.Optimizer) -> None:
    with strategy.scope():
        weights, bias, losses = train(strategy, optimizer)
    alone = OneDeviceStrategy("/cpu:7")
    expected = train(alone, optimizer)
    np.testing.assert_allclose(weights.numpy(), expected[0].numpy(), rtol=1e-10)
    np.testing.assert_allclose(bias.numpy(), expected[1].numpy(), rtol=1e-10)
    np.testing.assert_allclose(losses, expected[2], rtol=1e-10)
    assert losses[-1] < losses[0]
    assert strategy.iterations(optimizer) == STEPS
    for variable in (weights, bias):
        assert len({copy.tobytes() for copy in variable.values}) == 1  # the copies have the same bits


def test_state_of_an_optimizer_can_be_saved_and_restored(strategy: Strategy) -> None:
    optimizer, again = optim.Adam(0.05), optim.Adam(0.05)
    weights, bias, _ = train(strategy, optimizer)
    saved = weights.numpy(), bias.numpy(), strategy.optimizer_state(optimizer)
    strategy.restore_optimizer(again, strategy.iterations(optimizer), saved[2])

    def step(chosen: optim.Optimizer) -> None:
        strategy.apply_gradients(chosen, [(np.ones(FEATURES), weights), (np.ones(()), bias)])

    strategy.run(step, (optimizer,))
    expected = weights.numpy()
    weights.assign(saved[0])
    bias.assign(saved[1])
    strategy.run(step, (again,))
    np.testing.assert_array_equal(weights.numpy(), expected)
    assert strategy.iterations(again) == STEPS + 1


def test_the_state_of_an_optimizer_goes_with_it() -> None:
    states, optimizer, equal = OptimizerStates(2), optim.Adam(0.1), optim.Adam(0.1)
    slots = weakref.ref(states.of(optimizer, 1))
    assert states.of(equal) is not states.of(optimizer)
    del optimizer
    assert slots() is None
    assert states.optimizers == [equal]


def test_the_learning_rate_can_be_replaced(strategy: Strategy) -> None:
    optimizer = optim.SGD(1.0)
    weight = strategy.create_variable("w", np.zeros(2))
    strategy.set_learning_rate(optimizer, 0.25)
    strategy.run(lambda: strategy.apply_gradients(optimizer, [(np.full(2, 4.0 / strategy.local_replicas), weight)]))
    np.testing.assert_allclose(weight.numpy(), [-1.0, -1.0])


def test_statistics_are_each_replicas_own_and_their_mean_outside(two: MirroredStrategy) -> None:
    mean = two.create_variable("mean", np.zeros(1), trainable=False)

    def step(value: float) -> float:
        mean.assign([value])
        return float(mean.read()[0])

    assert two.run(step, (PerReplica([1.0, 4.0]),)).values == (1.0, 4.0)
    assert mean.numpy() == [2.5]
    mean.assign([7.0])
    assert [float(it[0]) for it in mean.values] == [7.0, 7.0]


def test_arguments_and_results_keep_their_structure(two: MirroredStrategy) -> None:
    pair = namedtuple("pair", "left right")
    got = two.run(
        lambda it, key: {"n": pair(it["a"][0], key), "none": None}, ({"a": [PerReplica([1, 2])]},), {"key": 5}
    )
    assert got["n"].left.values == (1, 2)
    assert got["n"].right.values == (5, 5)
    assert got["none"] is None
    assert two.experimental_local_results(got["n"].left) == (1, 2)
    assert two.experimental_local_results(3) == (3,)


def test_reduce_over_replicas_and_axes(two: MirroredStrategy) -> None:
    uneven = PerReplica([np.array([1.0, 2.0, 3.0]), np.array([6.0])])
    assert two.reduce("MEAN", PerReplica([1.0, 4.0]), axis=None) == 2.5
    assert two.reduce(ReduceOp.SUM, uneven, axis=0) == 12.0
    assert two.reduce(ReduceOp.MEAN, uneven, axis=0) == 3.0
    assert two.reduce(ReduceOp.MEAN, 5.0) == 5.0
    assert two.reduce(ReduceOp.SUM, {"a": (PerReplica([1, 2]),)}) == {"a": (3,)}
    np.testing.assert_array_equal(two.gather(uneven, axis=0), [1.0, 2.0, 3.0, 6.0])
    with pytest.raises(errors.BadRequest, match="for 2 replicas, whose sum is not defined"):
        two.reduce(ReduceOp.SUM, 5.0)
    with pytest.raises(errors.BadRequest, match="'max' is unknown"):
        two.reduce("max", uneven)
    with pytest.raises(errors.InvalidShape, match="along axis 3"):
        two.gather(uneven, axis=3)
    assert two.reduce("SUM", PerReplica([True, True])) == 2
    assert two.reduce("SUM", PerReplica([np.array([True, True]), np.array([False, True])])).tolist() == [1, 2]
    pair = namedtuple("pair", "loss count")
    assert two.reduce("SUM", pair(PerReplica([1.0, 2.0]), PerReplica([3, 4]))) == pair(3.0, 7)
    with pytest.raises(errors.BadRequest, match="values of <U1, which have no sum"):
        two.reduce("SUM", PerReplica([np.array("a"), np.array("b")]))
    with pytest.raises(errors.BadRequest, match="values of <U1, which have no sum"):
        two.reduce("SUM", PerReplica(["a", "b"]))
    with pytest.raises(errors.InvalidShape, match=r"shapes \(\), \(\) have no axis 0"):
        two.reduce("SUM", PerReplica([1.0, 2.0]), axis=0)
    with pytest.raises(errors.InvalidShape, match=r"shapes \(3,\), \(1,\) cannot be added"):
        two.reduce("SUM", uneven)


def test_all_reduce_takes_names_and_trees(two: MirroredStrategy) -> None:
    def step(value: float) -> Any:
        replica = get_replica_context()
        assert replica
        with pytest.raises(errors.BadRequest, match="reduce op 'MAX' is unknown"):
            replica.all_reduce("MAX", value)
        keys = ("b", "a") if replica.local_replica else ("a", "b")
        given = {key: (value, [np.full(2, value + (key == "b"))]) for key in keys}
        return replica.all_reduce("SUM", given)

    found = two.run(step, (PerReplica([1.0, 2.0]),))
    assert {key: float(it[0].values[0]) for key, it in found.items()} == {"a": 3.0, "b": 3.0}
    assert {key: it[1][0].values[1].tolist() for key, it in found.items()} == {"a": [3.0, 3.0], "b": [5.0, 5.0]}


def test_steps_at_the_wrong_place_say_what_to_do() -> None:
    strategy = MirroredStrategy(["/cpu:0", "/cpu:1"])
    with strategy.scope():
        optimizer, weight = keras.optimizers.SGD(0.1), strategy.create_variable("w", np.zeros(2))
    with pytest.raises(errors.WrongContext, match="of a MirroredStrategy is applied outside of run"):
        optimizer.apply_gradients([(np.ones(2), weight)])
    strategy.close()


def test_run_after_close_starts_the_threads_of_the_replicas_again() -> None:
    def number() -> int:
        replica = get_replica_context()
        assert replica
        return replica.replica_id_in_sync_group

    with MirroredStrategy(["/cpu:0", "/cpu:1"]) as strategy:
        pass
    assert [*strategy.run(number).values] == [0, 1]
    strategy.close()


def test_all_reduce_and_merge_call_within_run(two: MirroredStrategy) -> None:
    def step(value: float) -> tuple[Any, Any, int]:
        replica = get_replica_context()
        assert replica
        assert replica.num_replicas_in_sync == 2
        total = replica.all_reduce(ReduceOp.MEAN, [np.array([value]), np.array(value)])

        def cross(strategy: Strategy, values: PerReplica) -> PerReplica:
            assert in_cross_replica_context()
            return PerReplica([it * 10 for it in reversed(values.values)])

        return total, replica.merge_call(cross, (value,)), replica.replica_id_in_sync_group

    total, crossed, number = two.run(step, (PerReplica([1.0, 2.0]),))
    assert [it.tolist() for it in total[0].values] == [[1.5], [1.5]]
    assert [float(it) for it in total[1].values] == [1.5, 1.5]
    assert crossed.values == (20.0, 10.0)
    assert number.values == (0, 1)


def test_an_error_of_one_replica_ends_the_call_and_names_the_replica(two: MirroredStrategy) -> None:
    def step(number: int) -> None:
        replica = get_replica_context()
        assert replica
        if number == 1:
            raise ValueError("no such sample")
        replica.all_reduce(ReduceOp.SUM, np.ones(1))

    with pytest.raises(ValueError, match="no such sample") as caught:
        two.run(step, (PerReplica([0, 1]),))
    assert "raised in replica 1, on /cpu:1" in caught.value.__notes__
    assert two.run(lambda: 1).values == (1, 1)  # the strategy is usable again


def test_replicas_that_disagree_are_named_and_do_not_hang(two: MirroredStrategy) -> None:
    def returns_early(number: int) -> None:
        if replica := get_replica_context():
            _ = number or replica.all_reduce(ReduceOp.SUM, np.ones(1))

    def other_shape(number: int) -> None:
        if replica := get_replica_context():
            replica.all_reduce(ReduceOp.SUM, np.ones(1 + number))

    with pytest.raises(errors.RanksDisagree, match="replica 1 has returned while another one waits in all_reduce"):
        two.run(returns_early, (PerReplica([0, 1]),))
    with pytest.raises(errors.RanksDisagree, match=r"float64\[1\].*float64\[2\]"):
        two.run(other_shape, (PerReplica([0, 1]),))


def test_contexts_and_scopes(two: MirroredStrategy) -> None:
    assert not has_strategy()
    assert get_strategy().is_default
    alone = get_replica_context()
    assert alone
    assert alone.strategy.is_default
    with two.scope(), two.scope():
        assert get_strategy() is two
        assert has_strategy()
        assert in_cross_replica_context()
        with pytest.raises(errors.WrongContext, match="leave that one first"), MirroredStrategy(["/cpu:0"]).scope():
            pass
    inside = two.run(lambda: (get_strategy() is two, in_cross_replica_context()))
    assert inside[0].values == (True, True)
    assert inside[1].values == (False, False)
    assert not has_strategy()


def test_calls_at_the_wrong_place_say_where_they_belong(two: MirroredStrategy) -> None:
    optimizer, weight = optim.SGD(0.1), two.create_variable("w", np.zeros(1))
    with pytest.raises(errors.WrongContext, match=r"in the function that strategy\.run runs"):
        two.apply_gradients(optimizer, [(np.ones(1), weight)])
    with pytest.raises(errors.WrongContext, match="run is called within run"):
        two.run(lambda: two.run(lambda: 1))
    with pytest.raises(errors.WrongContext, match="reduce is called within run"):
        two.run(lambda: two.reduce(ReduceOp.SUM, 1))
    with pytest.raises(errors.WrongContext, match="w is trainable and cannot be assigned within run"):
        two.run(lambda: weight.assign([1.0]))


def test_variables_of_another_strategy_are_refused(two: MirroredStrategy) -> None:
    foreign = {
        "outside of any scope": get_strategy().create_variable("v", np.zeros(1)),
        "in the scope of another MirroredStrategy": MirroredStrategy(["/cpu:0"]).create_variable("v", np.zeros(1)),
        "in the scope of a CentralStorageStrategy": CentralStorageStrategy(["/cpu:0"]).create_variable(
            "v", np.zeros(1)
        ),
    }
    for said, variable in foreign.items():
        with pytest.raises(errors.WrongContext, match=f"variable v was made {said}"):
            two.run(lambda it: two.apply_gradients(optim.SGD(0.1), [(np.ones(1), it)]), (variable,))


def test_bad_gradients_name_the_variable(strategy: Strategy) -> None:
    weight = strategy.create_variable("w", np.zeros(2))
    state = strategy.create_variable("mean", np.zeros(2), trainable=False)
    for pairs, said in [
        ([(None, weight)], "no variable has a gradient"),
        ([(np.ones(3), weight)], r"w has the shape \(3,\), but the variable \(2,\)"),
        ([(np.ones(2), weight), (np.ones(2), weight)], "w is given twice"),
        ([(np.ones(2), state)], "mean is not trainable"),
    ]:
        with pytest.raises(errors.InvalidGradient, match=said):
            strategy.run(lambda it: strategy.apply_gradients(optim.SGD(0.1), it), (pairs,))


def test_a_value_of_another_shape_is_not_assigned(strategy: Strategy) -> None:
    weight = strategy.create_variable("w", np.zeros(2))
    with pytest.raises(errors.InvalidShape, match=r"w has the shape \(2,\), not \(3,\)"):
        weight.assign(np.zeros(3))
    weight.assign(4)
    np.testing.assert_array_equal(weight, [4.0, 4.0])


@pytest.mark.parametrize("kind", [RingAllReduce, ReductionToOneDevice, HierarchicalCopyAllReduce])
@pytest.mark.parametrize("replicas", [2, 3, 4, 7])
def test_cross_device_ops_add_all_sizes_and_dtypes(kind: type[CrossDeviceOps], replicas: int) -> None:
    strategy = MirroredStrategy([f"/cpu:{it}" for it in range(replicas)], kind())
    rng = np.random.default_rng(0)
    dtypes = ["float16", "float32", "float64", "int32", "int64", "uint8", "complex64"]
    given = [
        [rng.integers(0, 9, size).astype(dtype) for dtype in dtypes for size in (0, 1, 5, (3, 7), ())]
        for _ in range(replicas)
    ]

    def step(arrays: list[np.ndarray]) -> list[np.ndarray]:
        replica = get_replica_context()
        assert replica
        kept = [it.copy() for it in arrays]
        total: list[np.ndarray] = replica.all_reduce(ReduceOp.SUM, arrays)
        assert all(np.array_equal(mine, was) for mine, was in zip(arrays, kept, strict=True))
        return total

    got = strategy.run(lambda number: step(given[number]), (PerReplica(range(replicas)),))
    strategy.close()
    for place, each in enumerate(got):
        expected = sum(np.asarray(it[place]) for it in given)
        for result in each.values:
            assert result.dtype == given[0][place].dtype
            np.testing.assert_array_equal(result, expected.astype(result.dtype))  # type: ignore[union-attr]


def test_nccl_names_the_devices_that_are_no_gpus() -> None:
    with pytest.raises(errors.DeviceUnavailable, match=r"joins GPUs only, not /cpu:0, /cpu:1"):
        MirroredStrategy(["/cpu:0", "/cpu:1"], NcclAllReduce())
