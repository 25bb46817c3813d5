"""Split layers over ranks: stages x replicas x split, compared with one process. The ranks are threads of this process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import Checkpoint, DeviceMesh, Group, MultiWorkerPipelineStrategy, PipelineStrategy, keras
from support.ranks import run_ranks, succeeded

T = TypeVar("T")
layers = keras.layers
RNG = np.random.default_rng(0)
IDS, Y = RNG.integers(0, 11, size=(24, 3)), RNG.normal(size=(24, 5))


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def net(mesh: DeviceMesh | None, *, random: bool = False) -> keras.Model:
    """Returns a model whose layers are split over a mesh, or the same with whole layers. 2 divides neither 11 nor 7."""
    on = {"mesh": mesh} if mesh else {}
    apart, takes = ({"gather_output": False}, {"input_is_parallel": True}) if mesh else ({}, {})
    table: Any = layers.ParallelEmbedding if mesh else layers.Embedding
    column: Any = layers.ColumnParallelDense if mesh else layers.Dense
    row: Any = layers.RowParallelDense if mesh else layers.Dense
    return keras.Sequential(
        [
            keras.Input((3,)),
            table(11, 4, name="table", **on),
            layers.Flatten(name="flat"),
            column(7, "tanh", name="wide", **on, **apart),
            row(6, name="joined", **on, **takes),
            layers.Dropout(0.3, name="dropout") if random else layers.Dense(6, "tanh", name="whole"),
            column(7, "softmax", name="second", **on),
            row(5, name="last", **on),
        ],
        name="net",
    )


def made(strategy: Any, build: Callable[[], keras.Model]) -> keras.Model:
    """Returns a compiled model, with the same initial values each time."""
    with strategy.scope():
        model = build()
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse")
    for number, variable in enumerate(model.trainable_variables):
        variable.assign(np.random.default_rng(number).normal(size=variable.shape) / 3)
    return model


def trained(strategy: Any, model: keras.Model, steps: int) -> list[np.ndarray]:
    """Returns a model's variables and slots after some steps, the losses of an evaluation, and outputs."""
    model.fit(IDS, Y, batch_size=24, epochs=steps, shuffle=False, verbose=0)
    assert model.optimizer
    assert strategy.timings().steps == steps
    slots = model.optimizer.state()
    evaluated = model.evaluate(IDS, Y, batch_size=24, verbose=0)
    return [
        *model.get_weights(),
        *(slots[it] for it in sorted(slots)),
        np.array(evaluated),
        model.predict(IDS, verbose=0),
    ]


def in_ranks(
    sizes: tuple[int, int, int],
    work: Callable[[MultiWorkerPipelineStrategy], T],
    *,
    hosts: Sequence[int] = (),
    **given: Any,
) -> list[T | BaseException]:
    """Runs a function in the strategy of each rank of a mesh of stages, replicas and parts."""
    stages, replicas, split = sizes

    def run(group: Group) -> T:
        options = {"device": "/cpu:0", "micro_batches": 4 // replicas, "cut": ["whole"][: stages - 1], **given}
        with MultiWorkerPipelineStrategy(stages, replicas, split=split, group=group, **options) as strategy:
            return work(strategy)

    return run_ranks(stages * replicas * split, run, hosts=hosts)


def check_equal(found: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)


def check_same_bits(found: Sequence[Sequence[np.ndarray]]) -> None:
    assert len({b"".join(it.tobytes() for it in each) for each in found}) == 1


@pytest.fixture(scope="module")
def whole() -> list[np.ndarray]:
    """What one process has after 30 steps with whole layers."""
    keras.config.set_floatx("float64")
    with PipelineStrategy(stages=1, micro_batches=4) as strategy:
        return trained(strategy, made(strategy, lambda: net(None)), 30)


@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1), (1, 1, 3)])
def test_thirty_steps_on_a_mesh_give_the_variables_of_one_process(
    sizes: tuple[int, int, int], whole: list[np.ndarray]
) -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> list[np.ndarray]:
        return trained(strategy, made(strategy, lambda: net(strategy.mesh)), 30)

    found = succeeded(in_ranks(sizes, work))
    check_equal(found[0], whole)
    check_same_bits(found)


def test_each_rank_has_its_part_of_a_split_layer_and_the_layers_that_are_not_split() -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> tuple[int, int]:
        model = made(strategy, lambda: net(strategy.mesh))
        model.train_on_batch(IDS, Y)
        [stage] = strategy.timings().stages
        return sum(it.size for it in model.get_weights()), stage.fixed_bytes // 8 // 4  # value, gradient and two slots

    (elements, first), (_, second) = succeeded(in_ranks((1, 1, 2), work))
    kernels = 11 * 4 + 12 * 7 + 7 + 7 * 6 + 6 * 7 + 7 + 7 * 5
    both = elements - kernels
    assert first + second == elements + both


def test_a_measured_cut_and_recomputed_activations_take_split_layers(whole: list[np.ndarray]) -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> list[np.ndarray]:
        return trained(strategy, made(strategy, lambda: net(strategy.mesh)), 2)

    with PipelineStrategy(stages=1, micro_batches=4) as strategy:
        expected = trained(strategy, made(strategy, lambda: net(None)), 2)
    # "wide" leaves its output in parts, which a cut would gather.
    for found in succeeded(in_ranks((2, 1, 2), work, cut=["whole"], recompute=True, schedule="gpipe")):
        check_equal(found, expected)

    def plain(strategy: MultiWorkerPipelineStrategy) -> list[np.ndarray]:
        def build() -> keras.Model:
            parts = [layers.ColumnParallelDense(8, "tanh", mesh=strategy.mesh, name=f"dense_{it}") for it in range(4)]
            return keras.Sequential([keras.Input((3,)), *parts, layers.Dense(5)])

        model = made(strategy, build)
        model.fit(IDS.astype(float), Y, batch_size=24, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    check_same_bits(succeeded(in_ranks((2, 1, 2), plain, cut=None)))


def test_ranks_that_share_a_stage_draw_the_same_numbers_and_add_in_the_same_order() -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> list[np.ndarray]:
        model = made(strategy, lambda: net(strategy.mesh, random=True))  # each rank draws a seed of its own
        model.fit(IDS, Y, batch_size=24, epochs=2, shuffle=False, verbose=0)
        return [it.values[0] for it in model.weights if it.name in ("joined/bias", "last/bias")]

    # The ranks 0, 2 and 4 of one part are on two hosts, and 1, 3 and 5 of the other one too, but not in the same way.
    found = succeeded(in_ranks((1, 3, 2), work, hosts=[0, 0, 0, 1, 1, 1], micro_batches=2))
    check_same_bits(found)


def test_a_checkpoint_loads_into_another_mesh(tmp_path: Path) -> None:
    def work(strategy: Any, path: str | None = None) -> tuple[list[np.ndarray], str]:
        model = made(strategy, lambda: net(getattr(strategy, "mesh", None)))
        checkpoint = Checkpoint(model=model, optimizer=model.optimizer)
        checkpoint.restore(path)
        model.fit(IDS, Y, batch_size=24, epochs=2, shuffle=False, verbose=0)
        assert model.optimizer
        return model.get_weights(), checkpoint.save(tmp_path / f"of {model.optimizer.iterations} steps")

    with PipelineStrategy(stages=1, micro_batches=4) as strategy:
        _, first = work(strategy)
        expected, _ = work(strategy, first)
    for source, target in (((2, 1, 2), None), ((1, 1, 1), (1, 1, 2))):
        (_, saved), *_ = succeeded(in_ranks(source, work))
        if target:
            results = [values for values, _ in succeeded(in_ranks(target, lambda it, path=saved: work(it, path)))]
        else:
            with PipelineStrategy(stages=1, micro_batches=4) as strategy:
                results = [work(strategy, saved)[0]]
        for values in results:
            check_equal(values, expected)


def test_ranks_that_disagree_are_named() -> None:
    def other_data(strategy: MultiWorkerPipelineStrategy) -> None:
        model = made(strategy, lambda: net(strategy.mesh))
        model.train_on_batch(IDS + (strategy.rank == 3) * (IDS < 5), Y)

    for error in in_ranks((2, 1, 2), other_data):
        assert isinstance(error, errors.RanksDisagree)
        assert "rank 3 (part 1 of stage 1 of replica 0) computes with other samples than rank 2" in str(error)

    def other_mesh(group: Group) -> None:
        MultiWorkerPipelineStrategy(1 + group.rank, split=2 - group.rank, group=group, device="/cpu:0")

    for error in run_ranks(2, other_mesh):
        assert isinstance(error, errors.RanksDisagree)
        assert "rank 1 makes a strategy of 2 stages with 1 replicas, but rank 0 one of 1 stages with" in str(error)


def test_a_rank_that_leaves_is_named_with_its_part() -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> None:
        model = made(strategy, lambda: net(strategy.mesh))
        for _ in range(3):
            model.train_on_batch(IDS, Y)
            if strategy.rank == 1:
                return

    left = in_ranks((2, 1, 2), work)
    for rank in (0, 2, 3):
        assert isinstance(error := left[rank], errors.RankLost)
        assert "rank 1 of 4 (part 1 of stage 0 of replica 0) has left" in error.message


def test_what_a_mesh_of_ranks_cannot_do_is_refused() -> None:
    results: list[Any] = run_ranks(
        2, lambda group: MultiWorkerPipelineStrategy(2, split=2, group=group, device="/cpu:0")
    )
    assert all(
        "there are 2 processes, but 2 stages with 1 replicas, split over 2 ranks each, need 4" in str(it)
        for it in results
    )

    def narrow(strategy: MultiWorkerPipelineStrategy) -> None:
        with strategy.scope():
            with pytest.raises(
                errors.InvalidShape, match="the output of layer one has 1 elements, too few .* over 2 ranks"
            ):
                layers.ColumnParallelDense(1, mesh=strategy.mesh, name="one")
            with pytest.raises(errors.BadRequest, match="other ranks along its axis .* give mesh=strategy.mesh"):
                layers.ColumnParallelDense(4, mesh=strategy.mesh, axis="stage")
        with pytest.raises(errors.BadRequest, match="a Default[A-Za-z]* splits layers over devices alone"):
            layers.ColumnParallelDense(4, mesh=strategy.mesh)

    succeeded(in_ranks((1, 1, 2), narrow))
