"""Buckets: arrays that are reduced while they come, with the bits of single all-reduces, and ranks that disagree."""

import threading
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_distribute.collectives import Buckets, Group, ReduceOp
from support.ranks import SECURITY, addresses, run_ranks, sockets, succeeded

SHAPES: dict[str, tuple[int, ...]] = {
    "head.bias": (),
    "head": (7, 300),
    "body": (40_000,),
    "empty": (0, 3),
    "stem": (5,),
}
NBYTES = 10_000


def gradients(rank: int, step: int, dtypes: tuple[str, ...] = ("float32",)) -> dict[str, np.ndarray[Any, Any]]:
    drawn = np.random.default_rng((rank, step))
    return {
        name: drawn.standard_normal(shape).astype(dtypes[number % len(dtypes)])
        for number, (name, shape) in enumerate(SHAPES.items())
    }


@pytest.mark.parametrize(("ranks", "share"), [(1, True), (2, False), (3, True)])
def test_steps_have_the_bits_of_single_all_reduces(ranks: int, share: bool) -> None:
    def work(group: Group) -> None:
        for step in range(3):
            alone = {
                name: group.all_reduce(array, ReduceOp.MEAN)
                for name, array in gradients(group.rank, step, ("float32", "float64")).items()
            }
            with Buckets(group, nbytes=NBYTES, op=ReduceOp.MEAN) as buckets:
                for again in (step, step + 1, step):  # the memory of a step serves the next one
                    for name, array in gradients(group.rank, again, ("float32", "float64")).items():
                        buckets.add(name, array)
                    reduced = buckets.finish()
                assert list(reduced) == list(alone)
                for name, array in alone.items():
                    assert reduced[name].dtype == array.dtype
                    np.testing.assert_array_equal(reduced[name], array)

    succeeded(run_ranks(ranks, work, share=share))


def test_all_ranks_get_the_same_bits_over_a_ring() -> None:
    def work(group: Group) -> bytes:
        with Buckets(group, nbytes=NBYTES) as buckets:
            for name, array in gradients(group.rank, 0).items():
                buckets.add(name, array)
            return b"".join(array.tobytes() for array in buckets.finish().values())

    assert len(set(succeeded(run_ranks(3, work, share=False)))) == 1


def test_a_full_bucket_is_reduced_before_the_step_ends() -> None:
    reduced = threading.Event()

    class Observed(Group):
        def all_reduce(self, array: Any, op: ReduceOp = ReduceOp.SUM, *, layout: object = None) -> Any:
            reduced.set()
            return super().all_reduce(array, op, layout=layout)

    (listening,) = sockets(1)
    at = addresses([listening])
    with Observed.open(0, at, security=SECURITY, listening=listening) as group, Buckets(group, nbytes=8) as buckets:
        buckets.add("a", np.ones(1))
        assert reduced.wait(10)
        assert list(buckets.finish()) == ["a"]


@pytest.mark.parametrize("other", ["name", "order", "shape"])
def test_ranks_that_add_other_arrays_are_told(other: str) -> None:
    def work(group: Group) -> None:
        names = ["a", "b"]
        shapes: list[tuple[int, ...]] = [(4,), (4,)]
        if group.rank == 1:
            names = {"name": ["a", "c"], "order": ["b", "a"], "shape": names}[other]
            shapes = [(2, 2), (4,)] if other == "shape" else shapes
        with Buckets(group) as buckets:
            for name, shape in zip(names, shapes, strict=True):
                buckets.add(name, np.ones(shape))
            buckets.finish()

    for rank, error in enumerate(run_ranks(2, work)):
        assert isinstance(error, errors.RanksDisagree)
        assert f"rank {1 - rank} has other arrays than rank {rank} in the bucket that begins with" in str(error)


def test_misuse_is_refused() -> None:
    def work(group: Group) -> None:
        with Buckets(group) as buckets:
            assert buckets.finish() == {}
            buckets.add("a", np.ones(3))
            with pytest.raises(errors.BadRequest, match="'a' was added twice"):
                buckets.add("a", np.ones(3))
            assert list(buckets.finish()) == ["a"]

    succeeded(run_ranks(1, work))


def test_a_rank_that_ends_in_a_step_is_named() -> None:
    def work(group: Group) -> None:
        with Buckets(group, nbytes=NBYTES) as buckets:
            for step in range(3):
                for name, array in gradients(group.rank, step).items():
                    buckets.add(name, array)
                if step == 1 and group.rank == 1:
                    raise errors.Cancelled("this rank gives up")
                buckets.finish()

    first, second = run_ranks(2, work)
    assert isinstance(first, errors.RankLost)
    assert isinstance(second, errors.Cancelled)
