"""MultiWorkerPipelineStrategy over real connections, with ranks that are threads of this process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from shoal import errors
from shoal_coordinator.process import CoordinatorConfig, start_coordinator
from shoal_distribute import (
    Checkpoint,
    ClusterSpec,
    DeviceMesh,
    GradientTape,
    Group,
    MultiWorkerPipelineStrategy,
    PipelineStrategy,
    ReduceOp,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    keras,
)
from support.ranks import run_ranks, succeeded
from support.traces import recorded, roots, tree

T = TypeVar("T")
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(24, 6)), RNG.normal(size=(24, 3))
STEPS = 30
# What each of three stages does in a step.
PASSED = (
    [("send", "activations"), ("receive", "gradients")],
    [(verb, what) for verb in ("send", "receive") for what in ("activations", "gradients")],
    [("receive", "activations"), ("send", "gradients")],
)


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def residual() -> keras.Model:
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, "tanh", name="first")(inputs)
    y = keras.layers.BatchNormalization(name="norm")(x)
    y = keras.layers.Dropout(0.3, seed=1, name="dropout")(y)
    y = keras.layers.Dense(8, name="second")(y)
    outputs = keras.layers.Dense(3, name="last")(keras.layers.Add(name="add")([x, y]))
    return keras.Model(inputs, outputs, name="residual")


def tied() -> keras.Model:
    inputs = keras.Input((6,))
    layer, dropout = keras.layers.Dense(6, "tanh", name="tied"), keras.layers.Dropout(0.3, seed=1, name="dropout")
    x = keras.layers.Dense(6, name="middle")(dropout(layer(inputs)))
    return keras.Model(inputs, keras.layers.Dense(3, name="last")(dropout(layer(x))), name="tying")


def sequence() -> keras.Model:
    layers = [keras.layers.Dense(width, "tanh", name=f"dense_{number}") for number, width in enumerate((8, 8, 8, 3))]
    return keras.Sequential([keras.Input((6,)), *layers], name="net")


def made(strategy: Any, build: Callable[[], keras.Model]) -> keras.Model:
    """Returns a compiled model, with the same initial values each time."""
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse")
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(np.random.default_rng(number).normal(size=variable.shape) / 3)
    return model


def results(strategy: Any, model: keras.Model, x: np.ndarray = X, y: np.ndarray = Y) -> list[np.ndarray]:
    """Trains a model. Returns its variables and slots, losses of epochs and of an evaluation, and outputs."""
    fitted = model.fit(x, y, batch_size=len(x), epochs=STEPS, shuffle=False, verbose=0)
    assert strategy.timings().steps == STEPS
    slots = optimizer_of(model).state()
    outputs, evaluated = model.predict(x, verbose=0), model.evaluate(x, y, batch_size=len(x), verbose=0)
    losses = np.array([*fitted.history["loss"], evaluated])
    return [*model.get_weights(), *(slots[path] for path in sorted(slots)), losses, outputs]


def optimizer_of(model: keras.Model) -> keras.optimizers.Optimizer:
    assert model.optimizer
    return model.optimizer


def check_equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


def in_processes(
    stages: int,
    work: Callable[[MultiWorkerPipelineStrategy], T],
    *,
    replicas: int = 1,
    share: bool = True,
    **options: Any,
) -> list[T | BaseException]:
    """Runs a function in the strategy of each process."""

    def run(group: Group) -> T:
        with MultiWorkerPipelineStrategy(stages, replicas, group=group, device="/cpu:0", **options) as strategy:
            return work(strategy)

    return run_ranks(stages * replicas, run, share=share)


@pytest.mark.parametrize(
    ("build", "cut", "options"),
    [
        (residual, ["second"], {}),
        (residual, ["norm", "last"], {"schedule": "gpipe", "recompute": True, "share": False}),
        (tied, ["middle", "last"], {}),  # the first and the last stage have the tied layer
        (sequence, None, {}),
    ],
)
def test_stages_in_processes_equal_stages_in_one(build: Any, cut: Any, options: dict[str, Any]) -> None:
    stages = 2 if cut is None else len(cut) + 1
    with PipelineStrategy(stages=stages, micro_batches=4, cut=cut) as strategy:
        expected = results(strategy, made(strategy, build))

    def work(strategy: MultiWorkerPipelineStrategy) -> list[np.ndarray]:
        model = made(strategy, build)
        found = results(strategy, model)
        if "schedule" not in options:
            assert [it.peak_held for it in strategy.timings().stages] == [*range(stages, 0, -1)]
        return found

    for found in succeeded(in_processes(stages, work, micro_batches=4, cut=cut, **options)):
        check_equal(found, expected)


def test_replicas_of_a_pipeline_equal_one_pipeline_with_their_micro_batches() -> None:
    with PipelineStrategy(stages=2, micro_batches=4, cut=[2, 2]) as strategy:
        expected = results(strategy, made(strategy, sequence))

    def work(strategy: MultiWorkerPipelineStrategy) -> tuple[list[np.ndarray], Any, float]:
        replica = strategy.input_pipeline_id
        assert (strategy.stage, replica) == (strategy.rank % 2, strategy.rank // 2)
        gathered = strategy.gather(np.full((replica + 1, 1), replica), axis=0)
        return (
            results(strategy, made(strategy, sequence)),
            gathered.tolist(),
            strategy.reduce(ReduceOp.MEAN, np.array(replica + 1.0)),
        )

    # Each replica computes half of the micro-batches.
    for found, gathered, mean in succeeded(in_processes(2, work, replicas=2, micro_batches=2, cut=[2, 2])):
        check_equal(found, expected)
        assert (gathered, mean) == ([[0], [1], [1]], 1.5)


def test_replicas_of_stages_with_split_layers_equal_one_pipeline_with_whole_ones() -> None:
    mesh = DeviceMesh({"model": 2}, ["/cpu:0", "/cpu:1"])  # of each process
    column, row = keras.layers.ColumnParallelDense, keras.layers.RowParallelDense

    def split() -> keras.Model:
        layers = [
            column(8, "tanh", mesh=mesh, gather_output=False, name="dense_0"),
            row(8, "tanh", mesh=mesh, input_is_parallel=True, name="dense_1"),
            column(8, "tanh", mesh=mesh, name="dense_2"),
            keras.layers.Dense(3, "tanh", name="dense_3"),
        ]
        return keras.Sequential([keras.Input((6,)), *layers], name="net")

    with PipelineStrategy(stages=2, micro_batches=4, cut=[2, 2]) as strategy:
        expected = results(strategy, made(strategy, sequence))

    def work(strategy: MultiWorkerPipelineStrategy) -> list[np.ndarray]:
        return results(strategy, made(strategy, split))

    for found in succeeded(in_processes(2, work, replicas=2, micro_batches=2, cut=[2, 2])):
        check_equal(found, expected)


def test_replicas_share_their_statistics_at_the_end_of_an_epoch() -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> list[np.ndarray]:
        return results(strategy, made(strategy, residual))

    first, *others = succeeded(in_processes(2, work, replicas=2, micro_batches=2, cut=[3, 3]))
    for found in others:
        for ours, theirs in zip(found, first, strict=True):
            assert ours.tobytes() == theirs.tobytes()


def test_a_checkpoint_loads_into_another_number_of_stages(tmp_path: Path) -> None:
    def trained(strategy: Any, path: str | None = None) -> tuple[list[np.ndarray], str]:
        model = made(strategy, sequence)
        checkpoint = Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.restore(path)
        model.fit(X, Y, batch_size=24, epochs=3, shuffle=False, verbose=0)
        return model.get_weights(), checkpoint.save(tmp_path / f"of {optimizer_of(model).iterations} steps")

    with PipelineStrategy(stages=2, micro_batches=2, cut=[2, 2]) as strategy:
        _, first = trained(strategy)
        expected, _ = trained(strategy, first)
    (values, saved), *_ = succeeded(in_processes(4, lambda it: trained(it, first), micro_batches=2, cut=[1, 1, 1, 1]))
    check_equal(values, expected)
    with PipelineStrategy(stages=3, micro_batches=2, cut=[1, 1, 2]) as strategy:
        third, _ = trained(strategy, saved)
    with PipelineStrategy(stages=1, micro_batches=2) as strategy:
        check_equal(third, trained(strategy, saved)[0])


def test_the_times_of_the_ranks_show_the_late_stage() -> None:
    class Late(keras.layers.Activation):
        def call(self, inputs: Any, training: bool = False) -> Any:
            Event().wait(0.003)  # as if it computed
            return super().call(inputs, training)

    def late() -> keras.Model:
        layers = [keras.layers.Dense(8, name="first"), Late("tanh", name="late"), keras.layers.Dense(3, name="last")]
        return keras.Sequential([keras.Input((6,)), *layers])

    def work(strategy: MultiWorkerPipelineStrategy) -> dict[str, float]:
        strategy.register_metrics(registry := CollectorRegistry())
        model = made(strategy, late)
        for _ in range(20):
            model.train_on_batch(X, Y)
        stages.append(strategy.timings().stages[strategy.stage])
        return {it.name: it.value for family in registry.collect() for it in family.samples}

    stages: list[Any] = []
    found = succeeded(in_processes(3, work, micro_batches=4, cut=["late", "last"]))
    assert [it["shoal_rank_steps_total"] for it in found] == [20] * 3
    waits = [it["shoal_rank_wait_seconds_total"] for it in found]
    assert waits[1] == min(waits)
    assert min(waits[0], waits[2]) > 20 * 4 * 0.003 / 2
    for stage in stages:
        metrics = found[stage.stage]
        assert metrics["shoal_rank_stage"] == stage.stage
        assert metrics["shoal_rank_stage_seconds_total"] == pytest.approx(stage.compute_s + stage.wait_s)
        assert metrics["shoal_rank_stage_bubble_ratio"] == pytest.approx(stage.bubble)
        assert metrics["shoal_rank_ideal_bubble_ratio"] == 2 / 6
        assert 0 < metrics["shoal_rank_bubble_ratio"] < 1
    assert min(stages, key=lambda it: it.bubble).stage == 1


def test_a_trace_of_a_step_has_the_messages_of_its_stage() -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> None:
        made(strategy, sequence).train_on_batch(X, Y)

    with recorded() as recording:
        succeeded(in_processes(3, work, micro_batches=2, cut=[1, 1, 2]))
    for root in roots(recording.spans, "run"):
        stage = root.attributes["shoal.rank"]
        found = [it for it in recording.spans if it.parent == root.number and "shoal.direction" in it.attributes]
        assert {it.attributes["shoal.stage"] for it in found} == {stage}
        assert {it.attributes["shoal.bytes"] for it in found} == {12 * 8 * 8}
        expected = {f"{verb} {what}": 2 for verb, what in PASSED[stage]}
        assert {name: count for name, count in tree(recording.spans, root).items() if " " in name} == expected


def test_an_error_in_one_stage_ends_the_step_of_all() -> None:
    class Failing(keras.layers.Activation):
        def call(self, inputs: Any, training: bool = False) -> Any:
            if training:
                raise ValueError("it failed")
            return super().call(inputs, training)

    def work(strategy: MultiWorkerPipelineStrategy) -> None:
        model = made(strategy, lambda: keras.Sequential([keras.Input((6,)), keras.layers.Dense(3), Failing("tanh")]))
        model.fit(X, Y, batch_size=24, shuffle=False, verbose=0)

    *others, failed = in_processes(2, work, replicas=2, micro_batches=2, cut=[1, 1])
    assert isinstance(failed, ValueError | errors.InternalError)  # both last stages fail at the same time
    for error in others:
        assert isinstance(error, ValueError | errors.InternalError)
        assert "it failed" in str(error)
    assert any("computes stage 1 of replica" in str([str(it), *getattr(it, "__notes__", [])]) for it in others)


def test_stages_of_a_replica_that_get_other_samples_are_named() -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> None:
        model = made(strategy, sequence)
        model.train_on_batch(X + strategy.input_pipeline_id, Y)  # replicas may have data of their own
        model.train_on_batch(X + (strategy.rank == 3), Y)

    for error in in_processes(2, work, replicas=2, micro_batches=2, cut=[2, 2]):
        assert isinstance(error, errors.RanksDisagree)
        assert "rank 3 (stage 1) computes with other samples than rank 2 (stage 0); they compute stages" in str(error)


def test_a_rank_that_leaves_is_named_with_its_stage() -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> None:
        model = made(strategy, sequence)
        for _ in range(3):
            model.train_on_batch(X, Y)
            if strategy.rank == 2:
                return

    results = in_processes(2, work, replicas=2, micro_batches=2, cut=[2, 2])
    for rank in (0, 1, 3):
        error = results[rank]
        assert isinstance(error, errors.RankLost)
        assert error.details["rank"] == "2"
        assert "rank 2 of 4 (stage 0 of replica 1) has left" in error.message


def test_the_resolver_of_a_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(group: Group) -> None:
        monkeypatch.setattr("shoal_distribute.pipeline.processes.strategy.open_group", lambda _: group)
        resolver = SimpleClusterResolver(ClusterSpec({}))
        assert MultiWorkerPipelineStrategy(1, 1, resolver, device="/cpu:0").cluster_resolver is resolver
        found = MultiWorkerPipelineStrategy(1, device="/cpu:0").cluster_resolver
        assert isinstance(found, TFConfigClusterResolver)
        assert MultiWorkerPipelineStrategy(1, device="/cpu:0", group=group).cluster_resolver is None

    monkeypatch.delenv("SHOAL_COORDINATOR", raising=False)
    succeeded(run_ranks(1, work))


def test_what_processes_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.delenv("SHOAL_COORDINATOR", raising=False)
    with pytest.raises(errors.BadRequest, match="this process is alone, but 2 stages with 1 replicas need 2"):
        MultiWorkerPipelineStrategy(2)
    with pytest.raises(errors.BadRequest, match="replicas is 0; it must be a whole number, 1 or more"):
        MultiWorkerPipelineStrategy(2, 0)
    found = run_ranks(2, lambda group: MultiWorkerPipelineStrategy(3, group=group, device="/cpu:0"))
    assert all("there are 2 processes, but 3 stages" in str(it) for it in found)

    def few(strategy: MultiWorkerPipelineStrategy) -> None:
        made(strategy, sequence).fit(X, Y, batch_size=3, shuffle=False, verbose=0)

    small = in_processes(1, few, replicas=2, micro_batches=2)
    assert all("a batch has 1 samples, fewer than micro_batches=2" in str(it) for it in small)

    def looped(strategy: MultiWorkerPipelineStrategy) -> None:
        model = made(strategy, sequence)
        model.train_on_batch(X, Y)

        def step() -> None:
            with GradientTape() as tape:
                loss = keras.losses.MeanSquaredError()(Y, model(X, training=True))
            optimizer_of(model).minimize(loss, model.trainable_variables, tape)

        strategy.run(step)

    def other(strategy: MultiWorkerPipelineStrategy) -> None:
        with strategy.scope():
            a, b, c, d, e = (keras.layers.Dense(3, name=name) for name in "abcde")
            first = keras.Sequential([keras.Input((6,)), a, b, c, d])
            second = keras.Sequential([keras.Input((3,)), b, c, d, e])
            for model in (first, second):
                model.compile("sgd", "mse")
        first.train_on_batch(X, Y)
        second.train_on_batch(Y, Y)

    cut = in_processes(2, other, micro_batches=2, cut=[2, 2])
    assert all("give both models cuts that agree" in str(it) for it in cut), cut

    alone = in_processes(2, looped, micro_batches=2, cut=[2, 2])
    assert all("is in another process, that of stage" in str(it) for it in alone), alone


def test_a_coordinator_brings_the_processes_together_again() -> None:
    running = start_coordinator(CoordinatorConfig(listen="127.0.0.1:0"), CollectorRegistry())

    def work(_: Group) -> list[np.ndarray]:
        options: dict[str, Any] = {"coordinator": running.address, "group_name": "pipeline", "device": "/cpu:0"}
        with MultiWorkerPipelineStrategy(2, micro_batches=4, cut=[2, 2], **options) as strategy:
            return results(strategy, made(strategy, sequence))

    try:
        first, second = succeeded(run_ranks(2, work)), succeeded(run_ranks(2, work))
    finally:
        running.stop()
    assert len({b"".join(it.tobytes() for it in found) for found in (*first, *second)}) == 1
