"""MultiWorkerMirroredStrategy over real connections, with ranks that are threads of this process."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from shoal import errors, optim
from shoal.data import from_arrays
from shoal_distribute import (
    DistributedVariable,
    Group,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    PerReplica,
    ReduceOp,
    Strategy,
)
from shoal_distribute.collectives import BUCKET_BYTES
from support.programs.fitted_model import check_equals_one_process, fitted
from support.ranks import run_ranks, succeeded
from support.traces import recorded, roots, tree
from support.waiting import wait_until

T = TypeVar("T")
RNG = np.random.default_rng(0)
SAMPLES, STEPS = 60, 30
X, Y, START = RNG.normal(size=(SAMPLES, 4)), RNG.normal(size=SAMPLES), RNG.normal(size=4)


def in_processes(devices: list[int], work: Callable[[MultiWorkerMirroredStrategy], T]) -> list[T | BaseException]:
    """Runs a function in one strategy for each entry: its number of devices."""

    def run(group: Group) -> T:
        names = [f"/cpu:{number}" for number in range(devices[group.rank])]
        return work(MultiWorkerMirroredStrategy(devices=names, group=group))

    return run_ranks(len(devices), run)


def train(strategy: Strategy, x: np.ndarray, y: np.ndarray, start: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Trains least squares on this process's samples; returns the weights and the losses."""
    optimizer = optim.Adam(0.05, clip_norm=1.0)
    with strategy.scope():
        weights, bias = strategy.create_variable("w", start), strategy.create_variable("b", np.zeros(()))

    def step(x: np.ndarray, y: np.ndarray) -> float:
        error = x @ weights.read() + bias.read() - y
        gradients = [(2 * x.T @ error / SAMPLES, weights), (np.asarray(2 * error.sum() / SAMPLES), bias)]
        strategy.apply_gradients(optimizer, gradients)
        return float((error**2).sum() / SAMPLES)

    parts = tuple(PerReplica(np.array_split(it, strategy.local_replicas)) for it in (x, y))
    losses = [strategy.reduce(ReduceOp.SUM, strategy.run(step, parts)) for _ in range(STEPS)]
    return np.append(weights.numpy(), bias.numpy()), losses


@pytest.mark.parametrize("devices", [[1, 1], [2, 1, 1], [1, 3]])
def test_processes_with_any_devices_equal_one_process(devices: list[int]) -> None:
    def work(strategy: MultiWorkerMirroredStrategy) -> tuple[np.ndarray, list[float]]:
        assert strategy.num_replicas_in_sync == sum(devices)
        assert strategy.first_replica == sum(devices[: strategy.rank])
        x, y = (np.array_split(it, len(devices))[strategy.rank] for it in (X, Y))
        return train(strategy, x, y, START + strategy.rank)  # the first process's values count

    expected, wanted = train(OneDeviceStrategy("/cpu:0"), X, Y, START)
    results = succeeded(in_processes(devices, work))
    for values, losses in results:
        np.testing.assert_allclose(values, expected, rtol=1e-10)
        np.testing.assert_allclose(losses, wanted, rtol=1e-10)
    assert len({values.tobytes() for values, _ in results}) == 1


@pytest.mark.parametrize("devices", [[1, 1], [2, 2]])
def test_fit_equals_one_process(devices: list[int]) -> None:
    for result in succeeded(in_processes(devices, fitted)):
        check_equals_one_process(result)


@pytest.mark.parametrize("devices", [[1, 1, 1], [2, 1]])
def test_gradients_are_reduced_while_the_next_ones_are_computed(devices: list[int]) -> None:
    large = np.ones(BUCKET_BYTES // 8)

    def run(group: Group) -> tuple[list[float], bytes]:
        names = [f"/cpu:{number}" for number in range(devices[group.rank])]
        strategy = MultiWorkerMirroredStrategy(devices=names, group=group)
        first, second = (strategy.create_variable(name, 0 * large) for name in ("first", "second"))
        optimizer = optim.SGD(1.0)

        def step() -> None:
            sent = group.sent_bytes

            def backward() -> Iterator[tuple[np.ndarray, DistributedVariable]]:
                yield large, second
                # Without waiting for the second gradient:
                wait_until(lambda: group.sent_bytes >= sent + large.nbytes, what="the first bucket is reduced")
                yield 2 * large, first

            strategy.apply_gradients(optimizer, backward())

        strategy.run(step)
        strategy.close()
        values = first.numpy(), second.numpy()
        return [it[0] for it in values], b"".join(it.tobytes() for it in values)

    results = succeeded(run_ranks(len(devices), run, share=False))
    assert [values for values, _ in results] == [[-2.0 * sum(devices), -1.0 * sum(devices)]] * len(devices)
    assert len({values for _, values in results}) == 1


@pytest.mark.parametrize("devices", [[1, 1], [2, 1]])
def test_training_goes_on_after_a_step_that_no_process_could_complete(devices: list[int]) -> None:
    def work(strategy: MultiWorkerMirroredStrategy) -> float:
        weights, other = strategy.create_variable("w", np.zeros(4)), strategy.create_variable("o", np.zeros(4))
        optimizer = optim.SGD(1.0)

        def step(*gradients: np.ndarray | None) -> None:
            strategy.apply_gradients(optimizer, zip(gradients, (weights, other), strict=True))

        with pytest.raises(errors.InvalidGradient, match="o has the shape"):
            strategy.run(step, (np.ones(4), np.ones(3)))
        with pytest.raises(errors.InvalidGradient, match="no variable"):
            strategy.run(step, (None, None))
        strategy.run(step, (np.ones(4), None))
        return float(weights.numpy().sum())

    assert succeeded(in_processes(devices, work)) == [-4.0 * sum(devices)] * 2


def test_values_of_all_processes_are_reduced_and_gathered() -> None:
    def work(strategy: MultiWorkerMirroredStrategy) -> list[object]:
        rank = strategy.rank
        mean = strategy.create_variable("mean", np.zeros(2), trainable=False)
        strategy.run(lambda: mean.assign([rank, 1.0]))
        strategy.merge_statistics([mean])
        return [
            strategy.reduce(ReduceOp.SUM, strategy.run(lambda: float(rank))),
            strategy.reduce(ReduceOp.MEAN, np.arange(rank + 1.0), axis=0),
            strategy.gather(np.full((2, rank + 1), rank), axis=1).tolist(),
            mean.numpy().tolist(),
        ]

    wanted = [1.0, 1 / 3, [[0, 1, 1], [0, 1, 1]], [0.5, 1.0]]
    assert succeeded(in_processes([1, 1], work)) == [wanted, wanted]


def test_times_of_all_processes_are_known_to_each() -> None:
    def work(strategy: MultiWorkerMirroredStrategy) -> tuple[list[int], set[str]]:
        registry = CollectorRegistry()
        strategy.register_metrics(registry)
        train(strategy, X, Y, START)

        def told() -> list[int]:
            return [it.steps for it in strategy.timings().ranks]

        wait_until(lambda: told() == [STEPS, STEPS], what="a heartbeat has told the times")
        for times in strategy.timings().ranks:
            assert times.calls > STEPS
            assert 0 < times.wait + times.transfer < times.seconds
        assert [it.local_reduce > 0 for it in strategy.timings().ranks] == [True, False]  # by their devices
        text = generate_latest(registry).decode()
        found = {line for line in text.splitlines() if line.startswith(("shoal_rank_steps_total", "shoal_rank_ranks"))}
        strategy.gather(np.zeros(1), axis=0)  # no process leaves before the others know its times
        return told(), found

    wanted = [STEPS, STEPS], {f"shoal_rank_steps_total {STEPS:.1f}", "shoal_rank_ranks 2.0"}
    assert succeeded(in_processes([2, 1], work)) == [wanted, wanted]


def test_spans_of_collective_calls_are_in_those_of_run() -> None:
    def run(group: Group) -> None:
        strategy = MultiWorkerMirroredStrategy(devices=["/cpu:0", "/cpu:1"], group=group)
        weights, optimizer = strategy.create_variable("w", np.zeros(BUCKET_BYTES // 8)), optim.SGD(1.0)
        strategy.run(lambda: strategy.apply_gradients(optimizer, [(weights.read(), weights)]))
        strategy.close()

    with recorded() as recording:
        succeeded(run_ranks(2, run))
    spans = recording.spans
    assert [root.attributes["shoal.ranks"] for root in roots(spans, "run")] == [2, 2]
    for root in roots(spans, "run"):
        assert tree(spans, root)["all_reduce"] == 1  # by the thread of the buckets


def test_a_process_that_ends_fails_the_others_with_its_number() -> None:
    def work(strategy: MultiWorkerMirroredStrategy) -> None:
        if strategy.rank == 1:
            raise ValueError("no more data")
        train(strategy, X, Y, START)

    first, second = in_processes([2, 1], work)
    assert isinstance(second, ValueError)
    assert isinstance(first, errors.RankLost)
    assert "rank 1" in first.message


def test_processes_with_other_variables_are_refused() -> None:
    def work(strategy: MultiWorkerMirroredStrategy) -> None:
        strategy.create_variable("w", np.zeros(2 + strategy.rank))

    for result in in_processes([1, 1], work):
        assert isinstance(result, errors.RanksDisagree)


def test_batches_are_divided_between_processes_with_any_devices() -> None:
    def work(strategy: MultiWorkerMirroredStrategy) -> list[tuple[list[int], float]]:
        batches = strategy.experimental_distribute_dataset(from_arrays(np.arange(10.0)).batch(7).prefetch(1))
        return [
            (
                [len(part) for part in strategy.experimental_local_results(x)],
                strategy.reduce("sum", strategy.run(np.sum, (x,))),
            )
            for x in batches
        ]

    assert succeeded(in_processes([2, 1], work)) == [[([3, 2], 21.0), ([1, 1], 24.0)], [([2], 21.0), ([1], 24.0)]]


def test_processes_take_steps_until_none_has_data() -> None:
    def work(strategy: MultiWorkerMirroredStrategy) -> list[float]:
        own = strategy.distribute_datasets_from_function(
            lambda context: from_arrays(np.ones(4 * (1 + context.input_pipeline_id))).batch(2)
        )
        return [strategy.reduce("sum", strategy.run(np.sum, (x,))) for x in own]

    assert succeeded(in_processes([1, 1], work)) == [[4, 4, 2, 2]] * 2
