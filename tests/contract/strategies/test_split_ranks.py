"""Split layers over ranks, which are threads of this process, compared with one process."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import DeviceMesh, Group, MultiWorkerPipelineStrategy, PipelineStrategy, keras
from support.ranks import run_ranks, succeeded
from support.split_models import (
    CUT,
    IDS,
    MICRO_BATCHES,
    Y,
    check_equal,
    check_same_bits,
    layers,
    made,
    split_net,
    trained,
)

T = TypeVar("T")


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


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
        options = {"device": "/cpu:0", "micro_batches": MICRO_BATCHES // replicas, "cut": [CUT][: stages - 1], **given}
        with MultiWorkerPipelineStrategy(stages, replicas, split=split, group=group, **options) as strategy:
            return work(strategy)

    return run_ranks(stages * replicas * split, run, hosts=hosts)


def test_each_rank_has_its_part_of_a_split_layer_and_the_layers_that_are_not_split() -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> tuple[int, int]:
        model = made(strategy, lambda: split_net(strategy.mesh))
        model.train_on_batch(IDS, Y)
        [stage] = strategy.timings().stages
        return sum(it.size for it in model.get_weights()), stage.fixed_bytes // 8 // 4  # value, gradient and two slots

    (elements, first), (_, second) = succeeded(in_ranks((1, 1, 2), work))
    kernels = 11 * 4 + 12 * 7 + 7 + 7 * 6 + 6 * 7 + 7 + 7 * 5
    both = elements - kernels
    assert first + second == elements + both


@pytest.mark.parametrize("sizes", [(2, 1, 3), (1, 2, 2)])
def test_recomputed_activations_and_limits_of_single_gradients_are_those_of_one_process(
    sizes: tuple[int, int, int],
) -> None:
    def work(strategy: Any) -> list[np.ndarray]:
        mesh = getattr(strategy, "mesh", None)
        optimizer = lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.05)  # noqa: E731
        return trained(made(strategy, lambda: split_net(mesh), optimizer), 3)

    with PipelineStrategy(stages=1, micro_batches=MICRO_BATCHES) as strategy:
        expected = work(strategy)
    found = succeeded(in_ranks(sizes, work, recompute=True, schedule="gpipe"))
    check_equal(found[0], expected)
    check_same_bits(found)


def test_a_measured_cut_counts_the_parts_of_a_rank() -> None:
    def work(strategy: MultiWorkerPipelineStrategy, split: bool = True) -> list[np.ndarray]:
        def build() -> keras.Model:
            on = {"mesh": strategy.mesh} if split else {}
            kind: Any = layers.ColumnParallelDense if split else layers.Dense
            return keras.Sequential([keras.Input((3,)), *(kind(64, name=f"dense_{it}", **on) for it in range(4))])

        model = made(strategy, build)
        model.fit(IDS.astype(float), np.zeros((24, 64)), batch_size=24, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    kernel = 64 * 64 * 8 * 4  # bytes of the value, the gradient and two slots
    limited: dict[str, Any] = {"cut": None, "memory_limit": kernel * 3 // 2}
    check_same_bits(succeeded(in_ranks((2, 1, 2), work, **limited)))
    for error in in_ranks((2, 1, 2), lambda it: work(it, split=False), **limited):
        assert isinstance(error, errors.LimitExceeded)


def test_ranks_that_share_a_stage_draw_the_same_numbers_and_add_in_the_same_order() -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> list[np.ndarray]:
        model = made(strategy, lambda: split_net(strategy.mesh, random=True))  # each rank draws a seed of its own
        model.fit(IDS, Y, batch_size=24, epochs=2, shuffle=False, verbose=0)
        names = ("joined/bias", "last/bias", "norm/gamma", "norm/moving_mean")
        return [it.values[0] for it in model.weights if it.name in names]

    # The ranks 0, 2 and 4 of one part are on two hosts, and 1, 3 and 5 of the other one too, but not in the same way.
    check_same_bits(succeeded(in_ranks((1, 3, 2), work, hosts=[0, 0, 0, 1, 1, 1], micro_batches=2)))


def test_a_file_loads_into_another_kind_of_split(tmp_path: Path) -> None:
    path = str(tmp_path / "net.keras")

    def work(strategy: MultiWorkerPipelineStrategy) -> list[list[np.ndarray]]:
        model = made(strategy, lambda: split_net(strategy.mesh))
        model.train_on_batch(IDS, Y)
        model.save(path)
        strategy.of_ranks(0)  # the first rank has written the file
        with strategy.scope():
            again = keras.models.load_model(path, mesh=strategy.mesh)
        return [[*it.get_weights(), it.predict(IDS, verbose=0)] for it in (model, again)]

    (expected, found), *_ = succeeded(in_ranks((1, 1, 2), work))
    check_equal(found, expected)
    loaded = keras.models.load_model(path, mesh=DeviceMesh({"model": 2}, ["/cpu:0", "/cpu:1"]))
    check_equal([*loaded.get_weights(), loaded.predict(IDS, verbose=0)], expected)


def test_ranks_that_disagree_are_named() -> None:
    def other_data(strategy: MultiWorkerPipelineStrategy) -> None:
        model = made(strategy, lambda: split_net(strategy.mesh))
        model.train_on_batch(IDS + (strategy.rank == 3) * (IDS < 5), Y)

    for error in in_ranks((2, 1, 2), other_data):
        assert isinstance(error, errors.RanksDisagree)
        assert "rank 3 (part 1 of stage 1) computes with other samples than rank 2 (part 0 of stage 1)" in str(error)

    def other_mesh(group: Group) -> None:
        MultiWorkerPipelineStrategy(1 + group.rank, 1 + group.rank, split=2, group=group, device="/cpu:0")

    for error in run_ranks(2, other_mesh):
        assert isinstance(error, errors.RanksDisagree)
        assert "rank 1 makes a strategy of 2 stages with 2 replicas (each stage split over 2 ranks), but" in str(error)


def test_a_rank_that_leaves_is_named_with_its_part() -> None:
    def work(strategy: MultiWorkerPipelineStrategy) -> None:
        model = made(strategy, lambda: split_net(strategy.mesh))
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
        "there are 2 processes, but 2 stages with 1 replicas (each stage split over 2 ranks) need 4" in str(it)
        for it in results
    )

    def narrow(strategy: MultiWorkerPipelineStrategy) -> None:
        with strategy.scope():
            with pytest.raises(
                errors.InvalidShape, match=r"the output of layer one has 1 elements, too few .* over 2 ranks"
            ):
                layers.ColumnParallelDense(1, mesh=strategy.mesh, name="one")
            with pytest.raises(errors.BadRequest, match=r"other ranks along its axis .* give mesh=strategy.mesh"):
                layers.ColumnParallelDense(4, mesh=strategy.mesh, axis="stage")
        with pytest.raises(errors.BadRequest, match="a DefaultStrategy splits layers over devices alone"):
            layers.ColumnParallelDense(4, mesh=strategy.mesh)

    succeeded(in_ranks((1, 1, 2), narrow))
