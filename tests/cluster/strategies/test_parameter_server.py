"""ParameterServerStrategy in a real cluster."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import shoal
from shoal import errors, optim
from shoal.status import JobState
from shoal_distribute import (
    DistributedVariable,
    OneDeviceStrategy,
    ParameterServerStrategy,
    PerReplica,
    ReduceOp,
    Strategy,
)
from support.clusters.local import local_cluster
from support.programs.fitted_model import check_equals_one_process, fitted
from support.waiting import wait_until

RNG = np.random.default_rng(0)
X, Y, START, SAMPLES, STEPS = RNG.normal(size=(64, 4)), RNG.normal(size=64), RNG.normal(size=4), 64, 30


@pytest.fixture(scope="module")
def client() -> Iterator[shoal.Client]:
    """Yields a client of a cluster of two servers."""
    with local_cluster(servers=2, workers=0) as cluster, cluster.client() as client:
        yield client


class LeastSquares:
    """A model whose step also keeps a mean that is not trainable."""

    def __init__(self, strategy: Strategy, optimizer: optim.Optimizer, start: np.ndarray = START) -> None:
        self.strategy, self.optimizer = strategy, optimizer
        with strategy.scope():
            self.weights = strategy.create_variable("w", start)
            self.bias = strategy.create_variable("b", np.zeros(()))
            self.mean = strategy.create_variable("mean", np.zeros(()), trainable=False)
            strategy.adopt_optimizer(optimizer)

    def step(self, x: np.ndarray, y: np.ndarray) -> float:
        error = x @ self.weights.read() + self.bias.read() - y
        self.mean.assign(x.mean())
        gradients = [(2 * x.T @ error / SAMPLES, self.weights), (np.asarray(2 * error.sum() / SAMPLES), self.bias)]
        self.strategy.apply_gradients(self.optimizer, gradients)
        return float((error**2).sum() / SAMPLES)

    def train(self, x: np.ndarray, y: np.ndarray, steps: int = STEPS) -> list[float]:
        parts = tuple(PerReplica(np.array_split(it, self.strategy.local_replicas)) for it in (x, y))
        return [self.strategy.reduce(ReduceOp.SUM, self.strategy.run(self.step, parts)) for _ in range(steps)]


def expected() -> tuple[np.ndarray, np.ndarray, list[float]]:
    model = LeastSquares(OneDeviceStrategy("/cpu:0"), optim.Momentum(0.05))
    losses = model.train(X, Y)
    return model.weights.numpy(), model.bias.numpy(), losses


def check_equal(model: LeastSquares, losses: list[float] | None = None) -> None:
    weights, bias, wanted = expected()
    np.testing.assert_allclose(model.weights.numpy(), weights, rtol=1e-10)
    np.testing.assert_allclose(model.bias.numpy(), bias, rtol=1e-10)
    if losses is not None:
        np.testing.assert_allclose(losses, wanted, rtol=1e-10)


def test_one_worker_with_two_devices_equals_one_process(client: shoal.Client) -> None:
    strategy = ParameterServerStrategy(client=client, job="alone", devices=["/cpu:0", "/cpu:1"])
    model = LeastSquares(strategy, optim.Momentum(0.05))
    assert isinstance(model.weights, DistributedVariable)
    np.testing.assert_array_equal(model.weights.numpy(), START)  # before training begins
    losses = model.train(X, Y)
    check_equal(model, losses)
    np.testing.assert_allclose(model.mean.numpy(), X.mean())
    assert strategy.iterations(model.optimizer) == STEPS
    with pytest.raises(errors.WrongContext, match="w is on the servers and cannot be assigned"):
        model.weights.assign(0.0)
    with pytest.raises(errors.WrongContext, match="late is made after training has begun"):
        strategy.create_variable("late", np.zeros(1))
    with pytest.raises(errors.WrongContext, match=r"strategy\.session\.checkpoint"):
        strategy.optimizer_state(model.optimizer)
    strategy.set_learning_rate(model.optimizer, 0.0)

    def frozen() -> bool:
        before = model.weights.numpy()
        model.train(X, Y, steps=1)
        return np.array_equal(model.weights.numpy(), before)

    wait_until(frozen, what="the servers use the new learning rate")
    strategy.close()
    client.job("alone").wait(timeout_s=20)
    assert client.job("alone").status().state is JobState.SUCCEEDED


def test_synchronous_workers_add_their_gradients_and_divide_batches(client: shoal.Client) -> None:
    batches = shoal.data.from_arrays(np.arange(8)).batch(8)

    def worker(rank: int) -> tuple[list[int], int]:
        strategy = ParameterServerStrategy(
            client=client, job="together", workers=2, consistency=shoal.Synchronous(), devices=["/cpu:0"], shards=3
        )
        model = LeastSquares(strategy, optim.Momentum(0.05), START)
        part = slice(rank * 32, (rank + 1) * 32)
        model.train(X[part], Y[part])
        check_equal(model)
        replicas = strategy.num_replicas_in_sync
        (share,) = strategy.experimental_distribute_dataset(batches)
        strategy.close()
        return share.tolist(), replicas

    with ThreadPoolExecutor(2) as pool:
        found = sorted(pool.map(worker, range(2)))
    assert found == [([0, 1, 2, 3], 2), ([4, 5, 6, 7], 2)]


@pytest.mark.parametrize("workers", [1, 2])
def test_fit_equals_one_process(client: shoal.Client, workers: int) -> None:
    def worker(_: int) -> tuple[list[np.ndarray], list[float]]:
        strategy = ParameterServerStrategy(
            client=client,
            job=f"fit-{workers}",
            workers=workers,
            consistency=shoal.Synchronous(),
            devices=["/cpu:0", "/cpu:1"][: 3 - workers],
        )
        try:
            return fitted(strategy)
        finally:
            strategy.close()

    with ThreadPoolExecutor(workers) as pool:
        for result in pool.map(worker, range(workers)):
            check_equals_one_process(result, all_samples=workers == 1)  # each worker knows the loss of its own


def test_all_workers_get_the_initial_values_of_one(client: shoal.Client) -> None:
    def worker(rank: int) -> np.ndarray:
        strategy = ParameterServerStrategy(client=client, job="starts", workers=2, devices=["/cpu:0"])
        model = LeastSquares(strategy, optim.SGD(0.0), np.full(4, float(rank)))
        strategy.run(lambda: None)  # opens the session
        values = model.weights.numpy()
        strategy.close()
        return values

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(worker, range(2))
    np.testing.assert_array_equal(first, second)


def test_mistakes_are_named(client: shoal.Client) -> None:
    strategy = ParameterServerStrategy(client=client, job="mistakes", devices=["/cpu:0"])
    model = LeastSquares(strategy, optim.SGD(0.1))
    with pytest.raises(errors.InvalidVariable, match="there is a variable w already"):
        strategy.create_variable("w", np.zeros(1))
    with pytest.raises(errors.InvalidOptimizer, match="has one optimizer"):
        strategy.adopt_optimizer(optim.SGD(0.1))
    with pytest.raises(errors.InvalidOptimizer, match="was not made in the scope"):
        strategy.run(lambda: strategy.apply_gradients(optim.SGD(0.1), [(np.zeros(4), model.weights)]))
    strategy.close()
