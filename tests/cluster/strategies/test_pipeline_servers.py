"""Pipelines in several processes that push to parameter servers, in a real cluster. The processes are threads."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

import shoal
from shoal import _rpc, errors
from shoal.consistency import Consistency
from shoal.status import JobState
from shoal_distribute import (
    ClusterSpec,
    ParameterServerPipelineStrategy,
    PipelineStrategy,
    ReduceOp,
    SimpleClusterResolver,
    keras,
)
from support.clusters.local import local_cluster
from support.ranks import run_ranks, succeeded

T = TypeVar("T")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 6)), RNG.normal(size=(24, 3))
STEPS, STAGES = 30, 2


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shoal.Client]:
    with (
        local_cluster(servers=2, workers=0, checkpoints=str(tmp_path_factory.mktemp("checkpoints"))) as cluster,
        cluster.client() as client,
    ):
        yield client


def made(strategy: Any, *, normalizes: bool = False, clipped: float | None = None, tied: bool = False) -> keras.Model:
    """Returns a compiled model, with the same initial values each time."""
    with strategy.scope():
        first = keras.layers.Dense(6, "tanh", name="first")
        layers: list[keras.layers.Layer] = [first, keras.layers.Dense(6, "tanh", name="second")]
        layers += [keras.layers.BatchNormalization(name="norm")] if normalizes else []
        inputs = x = keras.Input((6,))
        for layer in [*layers, *([first] if tied else []), keras.layers.Dense(3, name="last")]:
            x = layer(x)
        model = keras.Model(inputs, x, name="net")
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=clipped), "mse", metrics=["mae"])
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(np.random.default_rng(number).normal(size=variable.shape) / 3)
    return model


def in_processes(
    client: shoal.Client, job: str, replicas: int, work: Callable[[ParameterServerPipelineStrategy], T], **options: Any
) -> list[T]:
    """Runs a function in the strategy of each process that a resolver lists."""
    count = STAGES * replicas
    with ExitStack() as held, ThreadPoolExecutor(count) as pool:
        ports = [held.enter_context(_rpc.reserve("127.0.0.1", 0)).getsockname()[1] for _ in range(count)]
        spec = ClusterSpec({"worker": [f"127.0.0.1:{port}" for port in ports]})

        def run(rank: int) -> T:
            listed = SimpleClusterResolver(spec, "worker", rank)
            given: dict[str, Any] = {"micro_batches": 2, "cut": ["second"], "device": "/cpu:0"} | options
            with ParameterServerPipelineStrategy(STAGES, replicas, listed, client=client, job=job, **given) as strategy:
                assert strategy.cluster_resolver is listed
                assert (strategy.rank, strategy.stage, strategy.input_pipeline_id) == (rank, rank % 2, rank // 2)
                return work(strategy)

        return list(pool.map(run, range(count)))


def check_equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


def test_replicas_that_push_to_servers_in_step_equal_one_pipeline(client: shoal.Client) -> None:
    with PipelineStrategy(stages=STAGES, micro_batches=4, cut=["second"]) as alone:
        model = made(alone)
        model.fit(X, Y, batch_size=24, epochs=STEPS, shuffle=False, verbose=0)
        expected, outputs = model.get_weights(), model.predict(X, verbose=0)

    def work(strategy: ParameterServerPipelineStrategy) -> list[np.ndarray]:
        own = made(strategy)
        assert strategy.num_replicas_in_sync == 2
        assert strategy.session is None
        own.fit(X, Y, batch_size=24, epochs=STEPS, shuffle=False, verbose=0)
        assert own.optimizer
        assert own.optimizer.iterations == strategy.timings().steps == STEPS
        assert strategy.session
        # The job of a stage has the variables of that stage alone.
        assert len(strategy.session.pull()) == (2 if strategy.stage == 0 else 4)
        assert strategy.reduce(ReduceOp.MEAN, np.array(strategy.input_pipeline_id)) == strategy.input_pipeline_id
        with pytest.raises(errors.WrongContext, match="is on the servers and cannot be assigned"):
            own.trainable_variables[0].assign(0.0)
        with pytest.raises(errors.WrongContext, match="late is made after training has begun"):
            strategy.create_variable("late", np.zeros(1))
        return [*own.get_weights(), own.predict(X, verbose=0)]

    for found in in_processes(client, "in-step", 2, work, consistency=shoal.Synchronous()):
        check_equal(found, [*expected, outputs])
    timings = client.job("in-step-stage-0").timings().groups
    assert sorted(timings) == [f"in-step-stage-0-replica-{number}" for number in range(2)]
    # The first stage knows its own steps, and those of the others up to their last heartbeat.
    assert [(len(it.ranks), it.ranks[0].steps) for it in timings.values()] == [(STAGES, STEPS)] * 2
    bubbles = [it.bubble() for it in timings.values()]
    assert [(it.stages, it.micro_batches) for it in bubbles if it] == [(STAGES, 2)] * 2
    for stage in range(STAGES):
        client.job(f"in-step-stage-{stage}").wait(timeout_s=20)
        assert client.job(f"in-step-stage-{stage}").status().state is JobState.SUCCEEDED


def test_parts_of_a_batch_weigh_as_much_as_their_samples(client: shoal.Client) -> None:
    weights = RNG.random(23)

    def work(strategy: Any) -> list[np.ndarray]:
        model = made(strategy)
        for _ in range(5):
            model.train_on_batch(X[:23], Y[:23], sample_weight=weights)
        return model.get_weights()

    with PipelineStrategy(stages=STAGES, micro_batches=4, cut=["second"]) as alone:
        expected = work(alone)
    for found in in_processes(client, "unequal", 2, work, consistency=shoal.Synchronous()):
        check_equal(found, expected)


@pytest.mark.parametrize("mode", [shoal.Asynchronous(), shoal.BoundedStaleness(1)])
def test_replicas_out_of_step_train_and_add_their_averages(client: shoal.Client, mode: Consistency) -> None:
    def work(strategy: ParameterServerPipelineStrategy) -> tuple[list[float], list[np.ndarray]]:
        model = made(strategy, normalizes=True)
        assert strategy.num_replicas_in_sync == 1
        losses = model.fit(X, Y, batch_size=24, epochs=STEPS, shuffle=False, verbose=0).history["loss"]
        *_, mean, variance, _, _ = model.get_weights()
        assert min(np.abs(mean).max(), np.abs(variance - 1).max()) > 0.05
        return losses, model.get_weights()

    for losses, _ in in_processes(client, f"free-{mode.name}".replace("_", "-"), 2, work, consistency=mode):
        assert losses[-1] < losses[0]


def test_a_pipeline_resumes_from_the_checkpoints_of_its_stages(client: shoal.Client) -> None:
    def work(strategy: ParameterServerPipelineStrategy) -> tuple[int, list[np.ndarray]]:
        model = made(strategy, normalizes=True)
        model.train_on_batch(X, Y)
        assert model.optimizer
        found = model.optimizer.iterations, model.get_weights()
        strategy.close()  # the job takes its last checkpoint
        return found

    options = {"checkpoints": shoal.CheckpointPolicy(every_steps=1), "restore": "auto"}
    first, second = (in_processes(client, "resumed", 1, work, **options) for _ in range(2))
    assert [steps for steps, _ in (*first, *second)] == [1, 1, 2, 2]
    with PipelineStrategy(stages=STAGES, micro_batches=2, cut=["second"]) as alone:
        model = made(alone, normalizes=True)
        model.train_on_batch(X, Y)
        check_equal(first[0][1], model.get_weights())
        model.train_on_batch(X, Y)
        check_equal(second[1][1], model.get_weights())


def test_weights_load_into_another_number_of_stages(client: shoal.Client, tmp_path: Path) -> None:
    path = str(tmp_path / "weights")

    def work(strategy: ParameterServerPipelineStrategy) -> list[np.ndarray]:
        model = made(strategy, normalizes=True)
        model.train_on_batch(X, Y)
        model.save_weights(path)
        return model.get_weights()

    expected, _ = in_processes(client, "moved", 1, work)
    with PipelineStrategy(stages=3, micro_batches=2, cut=["second", "last"]) as other:
        model = made(other, normalizes=True)
        model.load_weights(path)
        check_equal(model.get_weights(), expected)
        model.train_on_batch(X, Y)
        after = model.get_weights()

    def more(strategy: ParameterServerPipelineStrategy) -> list[np.ndarray]:
        again = made(strategy, normalizes=True)
        again.load_weights(path)
        again.train_on_batch(X, Y)
        return again.get_weights()

    for found in in_processes(client, "moved-again", 1, more, cut=["norm"]):
        check_equal(found, after)


def test_what_stages_with_servers_cannot_do_is_refused(client: shoal.Client, monkeypatch: Any) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(errors.BadRequest, match="there is no cut, but each of 2 replicas"):
        ParameterServerPipelineStrategy(2, 2, client=client)
    with pytest.raises(errors.BadRequest, match="there is no cut, but the checkpoint is of a cut"):
        ParameterServerPipelineStrategy(2, client=client, restore="auto")
    for replica in (None, 2, "0"):
        message = f"replica is {replica!r}; give the number of this process's replica, from 0 to 1, or list all proc"
        with pytest.raises(errors.BadRequest, match=message):
            ParameterServerPipelineStrategy(2, 2, client=client, cut=[1, 1], replica=replica)  # type: ignore[arg-type]
    with pytest.raises(errors.BadRequest, match=r"consistency is 'synchronous'; give .* shoal.Synchronous\(\)"):
        ParameterServerPipelineStrategy(2, client=client, consistency="synchronous")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="'checkpoint'; did you mean checkpoints"):
        ParameterServerPipelineStrategy(2, client=client, checkpoint=None)

    def work(strategy: ParameterServerPipelineStrategy) -> None:
        with pytest.raises(errors.InvalidOptimizer, match="limits the global norm to 1"):
            made(strategy, clipped=1.0)
        tied = made(strategy, tied=True)
        with pytest.raises(errors.InvalidLayer, match="is used in the stages 0 and 1"):
            tied.train_on_batch(X, Y)

    in_processes(client, "refused", 1, work)


def test_the_coordinator_brings_the_stages_of_each_replica_together(client: shoal.Client) -> None:
    """Also: a replica that ends early leaves the others, and its peers get its number and stage."""
    done: list[int] = []

    def work(rank: int) -> None:
        options: dict[str, Any] = {"micro_batches": 2, "cut": ["second"], "device": "/cpu:0", "replica": rank // STAGES}
        with ParameterServerPipelineStrategy(STAGES, 2, client=client, job="elsewhere", **options) as strategy:
            model = made(strategy)
            for step in range(4):
                model.train_on_batch(X, Y)
                if strategy.input_pipeline_id == 1 and strategy.stage == 0 and step == 1:
                    return
            done.append(strategy.rank)

    results = run_ranks(2 * STAGES, lambda it: work(it.rank))
    lost = [it for it in results if isinstance(it, errors.RankLost)]
    assert len(lost) == 1, results
    assert "(stage 0 of replica 1) has left" in lost[0].message
    succeeded([it for it in results if it is not lost[0]])
    assert sorted(done) == [0, 1]
