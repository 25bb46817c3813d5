"""ParameterServerStrategy in a real cluster."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import _rpc, errors, optim
from shoal.consistency import Consistency
from shoal.events import MetricsReported
from shoal.status import JobState
from shoal_distribute import (
    ClusterCoordinator,
    ClusterSpec,
    DistributedVariable,
    Group,
    GroupSession,
    OneDeviceStrategy,
    ParameterServerStrategy,
    PerReplica,
    ReduceOp,
    SimpleClusterResolver,
    Strategy,
    keras,
)
from support.clusters.local import local_cluster
from support.programs.fitted_model import X as X_FITTED
from support.programs.fitted_model import Y as Y_FITTED
from support.programs.fitted_model import check_equals_one_process, fitted
from support.ranks import run_ranks, succeeded
from support.scraping import scrape
from support.waiting import wait_until

RNG = np.random.default_rng(0)
X, Y, START, SAMPLES, STEPS = RNG.normal(size=(64, 4)), RNG.normal(size=64), RNG.normal(size=4), 64, 30


@pytest.fixture(scope="module")
def cluster() -> Iterator[shoal.LocalCluster]:
    """Yields a cluster of two servers."""
    with local_cluster(servers=2, workers=0) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    with cluster.client() as client:
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
        # `reduce` joins the values of this worker's replicas alone.
        assert strategy.reduce(ReduceOp.MEAN, strategy.run(lambda: 3.0)) == 3.0
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
            losses = result[1]
    assert client.job(f"fit-{workers}").wait(20).progress.samples == 8 * 32
    reports = metrics_of(client, f"fit-{workers}")
    for steps in (np.diff([0, *(it.step for it in own)]) for own in reports.values()):
        assert steps.sum() == 32
    if workers == 1:  # each report has the mean over its steps
        [own] = reports.values()
        steps = np.diff([0, *(it.step for it in own)])
        assert np.average([it.values["loss"] for it in own], weights=steps) == pytest.approx(np.mean(losses))


def test_an_asynchronous_fit_counts_samples(client: shoal.Client) -> None:
    with ParameterServerStrategy(client=client, job="counted", devices=["/cpu:0", "/cpu:1"]) as strategy:
        fitted(strategy, data=(X_FITTED[:9], Y_FITTED[:9]))  # 8 epochs with batches of 8 and 1
    assert client.job("counted").wait(20).progress.samples == 8 * 9


def metrics_of(client: shoal.Client, job: str) -> dict[str, list[MetricsReported]]:
    """Returns the reports of a job that was trained by `fit`, by worker."""
    found: dict[str, list[MetricsReported]] = {}
    for event in client.job(job).events(follow=False):
        if isinstance(event, MetricsReported) and event.values:
            assert event.values.keys() == {"loss", "accuracy"}
            found.setdefault(event.worker, []).append(event)
    return found


def test_a_scheduled_function_takes_single_batches(client: shoal.Client) -> None:
    with ParameterServerStrategy(client=client, job="batches", devices=["/cpu:0"]) as strategy:
        coordinator = ClusterCoordinator(strategy)
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, dtype="float64")])
            model.compile("sgd", "mse", metrics=["accuracy"])
        losses = [coordinator.schedule(lambda: model.train_on_batch(X_FITTED, Y_FITTED)[0]) for _ in range(3)]
        coordinator.join()
        assert np.isfinite(coordinator.fetch(losses)).all()
    assert len(metrics_of(client, "batches")) == 1


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


def test_moving_averages_of_asynchronous_workers_add_up(client: shoal.Client) -> None:
    read = Barrier(2, timeout=20)

    def worker(_: int) -> float:
        strategy = ParameterServerStrategy(client=client, job="moving", workers=2, devices=["/cpu:0"])
        with strategy.scope():
            weights = strategy.create_variable("w", np.zeros(1))
            average = strategy.create_variable("average", np.zeros(()), trainable=False)
            strategy.adopt_optimizer(optimizer := optim.SGD(0.1))

        def step() -> None:
            old = average.read()
            read.wait()  # both workers begin with the same value
            average.assign(0.9 * old + 0.1)
            strategy.apply_gradients(optimizer, [(np.ones(1), weights)])

        strategy.run(step)
        read.wait()  # both have pushed
        strategy.run(lambda: None)
        value = float(average.numpy())
        strategy.close()
        return value

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(worker, range(2))] == pytest.approx([0.2, 0.2])


def test_mistakes_are_named(client: shoal.Client) -> None:
    strategy = ParameterServerStrategy(client=client, job="mistakes", devices=["/cpu:0"])
    model = LeastSquares(strategy, optim.SGD(0.1))
    with pytest.raises(errors.InvalidVariable, match="there is a variable w already"):
        strategy.create_variable("w", np.zeros(1))
    with pytest.raises(errors.InvalidOptimizer, match="has one optimizer"):
        strategy.adopt_optimizer(optim.SGD(0.1))
    with pytest.raises(errors.InvalidOptimizer, match="was not made in the scope"):
        strategy.run(lambda: strategy.apply_gradients(optim.SGD(0.1), [(np.zeros(4), model.weights)]))
    with strategy.scope(), pytest.raises(errors.WrongContext, match="layer limited has a constraint for its kernel"):
        keras.layers.Dense(1, kernel_constraint="non_neg", name="limited").build((2,))
    strategy.close()


def pushes(cluster: shoal.LocalCluster) -> dict[str, float]:
    """Returns the number of pushes that each server has accepted."""
    families = {name: scrape(at)["shoal_server_pushes"] for name, at in cluster.metrics.items() if "server" in name}
    return {
        name: sum(it.value for it in family.samples if it.labels["outcome"] == "accepted")
        for name, family in families.items()
    }


def check_worker_in_group(number: int, processes: int, consistency: Consistency, **options: Any) -> None:
    """Trains as one of the workers, in groups of two, with four replicas in step; checks the result."""
    strategy = ParameterServerStrategy(
        job=f"groups-{consistency.name}",
        consistency=consistency,
        devices=["/cpu:0", "/cpu:1"][: 4 // processes],
        shards=2,
        **options,
    )
    rank = number % 2
    model = LeastSquares(strategy, optim.Momentum(0.05), START + rank)  # the first one's values count
    strategy.run(lambda: None)
    part = np.array_split(np.arange(SAMPLES), processes)[strategy.input_pipeline_id]
    model.train(X[part], Y[part])
    check_equal(model)
    np.testing.assert_allclose(model.mean.numpy(), X.mean())
    assert strategy.num_replicas_in_sync == 4
    assert strategy.reduce(ReduceOp.MEAN, strategy.run(lambda: float(rank))) == 0.5  # of the group
    assert strategy.iterations(model.optimizer) == STEPS
    assert (strategy.session is None) is (rank > 0)
    strategy.close()


def test_groups_push_half_as_often_and_equal_one_process(cluster: shoal.LocalCluster, client: shoal.Client) -> None:
    before = pushes(cluster)
    with ExitStack() as held, ThreadPoolExecutor(4) as pool:
        ports = [held.enter_context(_rpc.reserve("127.0.0.1", 0)).getsockname()[1] for _ in range(4)]
        spec = ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]})

        def worker(number: int) -> None:
            listed = SimpleClusterResolver(spec, "worker", number)
            mode = shoal.Synchronous()
            check_worker_in_group(number, 4, mode, client=client, cluster_resolver=listed, group_size=2)

        list(pool.map(worker, range(4)))
    # Two groups make a push each: without groups, there would be four in each step.
    assert {name: count - before[name] for name, count in pushes(cluster).items()} == dict.fromkeys(before, STEPS * 2)


def test_the_gradients_of_a_given_group_are_added_in_other_modes(client: shoal.Client) -> None:
    mode = shoal.BoundedStaleness(0)
    workers = run_ranks(2, lambda it: check_worker_in_group(it.rank, 2, mode, client=client, group=it, workers=2))
    succeeded(workers)


def test_fit_in_a_group_takes_a_last_batch_that_leaves_a_worker_without_samples(client: shoal.Client) -> None:
    few, validation = (X_FITTED[:9], Y_FITTED[:9]), (X_FITTED[:1], Y_FITTED[:1])

    def worker(group: Group) -> tuple[list[np.ndarray], list[float]]:
        mode, devices = shoal.Synchronous(), ["/cpu:0"]
        strategy = ParameterServerStrategy(
            client=client, job="few", group=group, workers=2, consistency=mode, devices=devices
        )
        try:
            return fitted(strategy, data=few, validation_data=validation)
        finally:
            strategy.close()

    weights, losses = fitted(None, data=few)
    for found, found_losses in succeeded(run_ranks(2, worker)):
        np.testing.assert_allclose(found_losses, losses, rtol=1e-10)
        for own, wanted in zip(found, weights, strict=True):
            np.testing.assert_allclose(own, wanted, rtol=1e-10)
    assert len(metrics_of(client, "few")) == 1
    assert client.job("few").wait(20).progress.samples == 8 * 9
    [timings] = client.job("few").timings().groups.values()
    assert (len(timings.ranks), timings.ranks[0].calls > 0) == (2, True)  # the other one may have told none yet


NUMBERS = np.arange(36.0)


def group_session(client: shoal.Client, group: Group, job: str, **options: Any) -> GroupSession:
    variables = {"w": np.zeros(()), "seen": shoal.Variable.of(np.zeros(()), trainable=False, aggregation="sum")}
    return GroupSession(group, client, job, variables, optimizer=optim.SGD(1.0), batch_size=5, range_size=10, **options)


def test_the_account_has_the_samples_of_all_members(client: shoal.Client) -> None:
    def member(group: Group) -> list[np.ndarray]:
        with group_session(client, group, "accounted", epochs=2) as session:
            parts = []
            for numbers in session.batches(len(NUMBERS)):
                session.pull()
                parts.append(numbers)
                if len(numbers):
                    w, seen = NUMBERS[numbers].mean(), np.float64(len(numbers))
                    session.push({"w": w}, updates={"seen": seen}, weight=len(numbers))
                else:
                    session.skip()  # the other member pushes
            values = session.pull()
            batches = 16  # of 5, 5; 5, 5; 5, 5; 5, 1 samples in each epoch
            assert session.step == batches
            assert values["seen"] == 2 * len(NUMBERS)
            return [*parts, np.array([values["w"]])]

    (*first, w), (*second, same) = succeeded(run_ranks(2, member))
    joined = [np.concatenate(parts) for parts in zip(first, second, strict=True)]
    assert sorted(np.concatenate(joined)) == sorted([*range(36)] * 2)
    assert w == same == pytest.approx(-sum(NUMBERS[batch].mean() for batch in joined))
    status = client.job("accounted").status()
    assert status.state is JobState.SUCCEEDED
    assert status.progress.samples == 2 * len(NUMBERS)
    assert client.job("accounted").data().total.done == 2 * len(NUMBERS)


def test_other_groups_go_on_when_a_member_dies(client: shoal.Client) -> None:
    ended, began = Event(), Barrier(2)

    def member(group: Group, number: int) -> list[int]:
        with group_session(client, group, "one-dies", workers=2, worker=f"group-{number}") as session:
            batches = session.batches(len(NUMBERS))
            seen = list(next(batches))
            if group.rank == 0:
                began.wait()  # both groups have a range
            if number == 0 and group.rank == 1:
                group.close()  # as if it had died
                return []
            if number == 1 and group.rank == 0:
                assert ended.wait(30)
            session.push({"w": np.float64(1)}, updates={"seen": np.float64(1)}, weight=len(seen))
            for numbers in batches:
                seen += list(numbers)
                session.pull()  # waits until the servers know that the other group has ended
                session.push({"w": np.float64(1)}, updates={"seen": np.float64(1)}, weight=max(len(numbers), 1))
            return seen

    def run(number: int) -> list[list[int] | BaseException]:
        try:
            return run_ranks(2, lambda group: member(group, number))
        finally:
            if number == 0:
                ended.set()

    with ThreadPoolExecutor(2) as pool:
        (lost, _), survivors = pool.map(run, range(2))
    assert isinstance(lost, errors.RankLost)
    assert "rank 1" in lost.message
    assert sorted(it for part in succeeded(survivors) for it in part) == [*range(36)]
    status = client.job("one-dies").status()
    assert status.state is JobState.SUCCEEDED
    assert [(it.worker, "rank 1" in it.reason) for it in status.members if it.reason] == [("group-0", True)]


def test_mistakes_of_a_member_are_named_and_push_nothing(client: shoal.Client) -> None:
    def member(group: Group) -> None:
        own, w, seen = group.rank == 1, np.float64(1), {"seen": np.float64(1)}
        with pytest.raises(errors.RanksDisagree, match="rank 1 of the group has other variables"):
            GroupSession(group, client, "differ", {"w": np.zeros(1 + own)})
        with pytest.raises(errors.InternalError if own else TypeError, match="batchsize"):
            group_session(client, group, "mistyped", batchsize=1)
        with group_session(client, group, "group-mistakes") as session:
            session.pull()
            with pytest.raises(
                errors.InvalidGradient, match="no trainable variable v" if own else "rank 1 of the group"
            ):
                session.push({"v" if own else "w": w}, updates=seen)
            with pytest.raises(
                errors.BadRequest if own else errors.InvalidGradient, match="weight" if own else "rank 1 of the group"
            ):
                session.push({"w": w}, updates=seen, weight=0 if own else 1)
            with pytest.raises(ValueError if own else errors.InvalidGradient):
                session.push({"w": w}, updates=seen, metrics={"loss": "low" if own else 1.0})  # type: ignore[dict-item]
            with pytest.raises(errors.RanksDisagree, match="ranks 0, 1 of the group push"):
                session.push({"w": w}, updates=seen, metrics={"loss": 1.0} if own else None)
            with pytest.raises(errors.NonFiniteGradient):
                session.push({"w": np.float64("nan") if own else w}, updates=seen)
            assert session.skip().outcome == "skipped"
            session.push({"w": np.float64(3) if own else w}, updates=seen, weight=3.0 if own else 1.0)
            assert session.pull() == {"w": -2.5, "seen": 2.0}
            session.set_learning_rate(0.5)

    succeeded(run_ranks(2, member))
