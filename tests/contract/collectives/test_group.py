"""Collectives of ranks on loopback: results, bits, bytes and failures, over connections, shared memory and both."""

import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shoal import errors
from shoal._transport import Lane
from shoal_distribute.collectives import Group, ReduceOp
from shoal_distribute.group_arrays import sums_of
from support import run_lengths
from support.ranks import run_ranks, succeeded

SIZES = [0, 1, 5, 8_191, 300_007, 1_000_003, *run_lengths.size([], [10_000_019])]
DTYPES = ["float32", "float64", "float16", "int8", "int32", "uint64", "complex64", ml_dtypes.bfloat16]
WAYS = ["connections", "shared memory", "mixed"]

# Runs a function as each rank of a group: the number of ranks, and the function.
Run = Callable[[int, Callable[[Group], Any]], list[Any]]


def given(rank: int, size: int, dtype: Any, seed: int = 0) -> np.ndarray[Any, Any]:
    """Returns small whole numbers, whose sums are exact in each dtype."""
    return np.random.default_rng((seed, rank)).integers(0, 5, size).astype(dtype)


@pytest.fixture(params=WAYS)
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "mixed":
        return lambda ranks, work: run_ranks(ranks, work, hosts=[rank % 2 for rank in range(ranks)])
    return lambda ranks, work: run_ranks(ranks, work, share=request.param == "shared memory")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_all_reduce_gives_each_rank_the_sum(ranks: int, run: Run) -> None:
    def work(group: Group) -> list[np.ndarray[Any, Any]]:
        return [group.all_reduce(given(group.rank, size, dtype)) for size in SIZES for dtype in DTYPES[:2]]

    expected = [
        sum((given(rank, size, dtype) for rank in range(ranks)), start=np.zeros(size, dtype))
        for size in SIZES
        for dtype in DTYPES[:2]
    ]
    for result in succeeded(run(ranks, work)):
        for got, wanted in zip(result, expected, strict=True):
            np.testing.assert_array_equal(got, wanted)


def test_every_dtype_of_numbers_is_reduced(run: Run) -> None:
    def work(group: Group) -> list[np.ndarray[Any, Any]]:
        return [group.all_reduce(given(group.rank, 40_003, dtype)) for dtype in DTYPES]

    for result in succeeded(run(3, work)):
        for got, dtype in zip(result, DTYPES, strict=True):
            assert got.dtype == np.dtype(dtype)
            np.testing.assert_array_equal(got, sum(given(rank, 40_003, dtype) for rank in range(3)))


def test_all_ranks_get_the_same_bits(run: Run) -> None:
    def work(group: Group) -> tuple[bytes, bytes]:
        drawn = np.random.default_rng(group.rank).standard_normal(500_003)
        return group.all_reduce(drawn, ReduceOp.MEAN).tobytes(), group.all_reduce(drawn[:100]).tobytes()

    assert len(set(succeeded(run(4, work)))) == 1


def test_the_mean_is_that_of_all_ranks(run: Run) -> None:
    def work(group: Group) -> tuple[float, float]:
        large, small = np.full(100_000, float(group.rank)), np.full((2, 3), float(group.rank), np.float32)
        return group.all_reduce(large, ReduceOp.MEAN).max(), float(group.all_reduce(small, ReduceOp.MEAN).min())

    assert set(succeeded(run(4, work))) == {(1.5, 1.5)}


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_other_collectives(ranks: int, run: Run) -> None:
    def work(group: Group) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        part = group.reduce_scatter(given(group.rank, 100_003, np.int64)).copy()
        gathered = group.all_gather(np.full((3, 2), group.rank, np.float32))
        group.barrier()
        sent = group.broadcast(np.arange(50_000.0) * (group.rank + 1), root=ranks - 1)
        return part, gathered, sent

    results = succeeded(run(ranks, work))
    total = sum(given(rank, 100_003, np.int64) for rank in range(ranks))
    np.testing.assert_array_equal(np.concatenate([part for part, _, _ in results]), total)
    for _, gathered, sent in results:
        np.testing.assert_array_equal(gathered, np.arange(ranks)[:, None, None] * np.ones((3, 2)))
        np.testing.assert_array_equal(sent, np.arange(50_000.0) * ranks)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_ring_takes_the_fewest_rounds_and_bytes(ranks: int) -> None:
    array = np.zeros(240_000, np.float32)

    def work(group: Group) -> tuple[int, int]:
        group.all_reduce(array.copy())
        return group.rounds, group.sent_bytes

    fewest = 2 * (ranks - 1) * array.nbytes // ranks
    assert succeeded(run_ranks(ranks, work, share=False)) == [(2 * (ranks - 1), fewest)] * ranks


@pytest.mark.parametrize("root", [0, 2])
def test_each_rank_passes_on_a_large_broadcast_once(root: int) -> None:
    array = np.arange(300_007.0)

    def work(group: Group) -> int:
        np.testing.assert_array_equal(group.broadcast(array.copy() if group.rank == root else array * 0, root), array)
        return group.sent_bytes

    sent = [array.nbytes] * 4
    sent[(root - 1) % 4] = 0  # the last one of the chain
    assert succeeded(run_ranks(4, work, share=False)) == sent


def test_a_sending_thread_that_fails_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    send = Lane.send

    def fails(lane: Lane, *args: Any, **options: Any) -> None:
        if threading.current_thread().name == "rank 1 sends to rank 2":
            raise ValueError("the frame is too large")
        send(lane, *args, **options)

    monkeypatch.setattr(Lane, "send", fails)
    results = run_ranks(3, lambda group: group.all_reduce(np.zeros(100_000)), share=False)
    assert all(isinstance(it, errors.InternalError) for it in results), results
    assert all("rank 1 cannot send to rank 2: ValueError: the frame is too large" in str(it) for it in results)


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_that_make_other_calls_are_named(ranks: int, run: Run) -> None:
    def work(group: Group) -> None:
        group.all_reduce(np.zeros(3))
        if group.rank == 1:
            group.all_reduce(np.zeros(4))
        else:
            group.all_reduce(np.zeros(5))

    results = run(ranks, work)
    assert all(isinstance(it, errors.RanksDisagree) for it in results), results
    assert all("rank 1 makes all_reduce of 4 float64 by sum" in str(it) for it in results)
    assert all("of 5 float64" in str(it) for it in results)


@pytest.mark.parametrize("call", ["all_reduce", "all_gather", "broadcast", "packed"])
def test_ranks_whose_arrays_have_other_shapes_are_named(call: str) -> None:
    def work(group: Group) -> None:
        array = np.zeros((2, 3) if group.rank else (3, 2))
        if call == "packed":
            sums_of(group, [array[0], array[1:]])
        else:
            getattr(group, call)(array)

    results = run_ranks(2, work, share=False)
    assert all(isinstance(it, errors.RanksDisagree) for it in results), results
    assert all("with another shape" in str(it) for it in results)


@pytest.mark.parametrize("call", ["all_reduce", "barrier"])
def test_a_rank_that_has_ended_is_named(call: str, run: Run) -> None:
    def work(group: Group) -> None:
        group.barrier()
        if group.rank == 2:
            return
        for _ in range(3):
            if call == "barrier":
                group.barrier()
            else:
                group.all_reduce(np.zeros(1 << 20))

    *others, last = run(3, work)
    assert last is None
    for it in others:
        assert isinstance(it, errors.RankLost), it
        assert "rank 2 of 3" in str(it)


def test_a_group_that_was_closed_says_so(run: Run) -> None:
    def work(group: Group) -> None:
        group.barrier()
        group.close()
        with pytest.raises(errors.RankLost, match=f"rank {group.rank} of 2 has left the group"):
            group.check()

    succeeded(run(2, work))


def test_arrays_that_cannot_be_reduced_are_refused() -> None:
    def work(group: Group) -> list[str]:
        said = []
        for array, op in [
            (np.zeros(3, object), ReduceOp.SUM),
            (np.zeros(3, np.int32), ReduceOp.MEAN),
            (np.zeros((4, 4)).T[1:], ReduceOp.SUM),
        ]:
            with pytest.raises(errors.BadRequest) as raised:
                group.all_reduce(array, op)
            said.append(raised.value.message)
        with pytest.raises(errors.BadRequest) as raised:
            group.broadcast(np.zeros(1), root=1)
        return [*said, raised.value.message]

    (said,) = succeeded(run_ranks(1, work))
    assert [it.split("; ")[0] for it in said] == [
        "an array of object cannot be reduced",
        "the mean of int32 is not a whole number",
        "the array is not contiguous and writable",
        "root is 1",
    ]


@pytest.mark.parametrize("hosts", [[0, 0, 0, 0], [0, 1, 0, 1], [0, 1, 2, 3]])
def test_subgroups_make_calls_of_their_own(hosts: list[int]) -> None:
    def work(group: Group) -> list[list[float]]:
        line = group.subgroup([0, 1] if group.rank < 2 else [2, 3])
        column = group.subgroup([group.rank % 2, group.rank % 2 + 2])
        large = np.full(100_000, 1.0 + group.rank)
        found = [line.all_reduce(np.array([1.0 + group.rank])), column.all_reduce(large, ReduceOp.MEAN)[:1]]
        found += [line.broadcast(np.array([10.0 * group.rank]), root=1), group.all_reduce(np.ones(1))]
        line.pass_soon(1 - line.rank, b"two", [large, np.zeros((0, 2))])
        said, (passed, empty) = line.passed(1 - line.rank, lambda _: [np.empty(100_000), np.empty((0, 2))])
        line.flush()
        assert (said, empty.shape) == (b"two", (0, 2))
        column.agree("the end")
        line.close()
        column.close()
        return [it.tolist() for it in (*found, passed[-1:])]

    assert succeeded(run_ranks(4, work, hosts=hosts)) == [
        [[3.0], [2.0], [10.0], [4.0], [3.0]],
        [[3.0], [3.0], [10.0], [4.0], [2.0]],
        [[7.0], [2.0], [30.0], [4.0], [3.0]],
        [[7.0], [3.0], [30.0], [4.0], [2.0]],
    ]


def test_calls_of_a_subgroup_do_not_wait_for_what_another_one_sends() -> None:
    def work(group: Group) -> list[float]:
        stage = group.subgroup([0, 1] if group.rank < 2 else [2, 3])
        line = group.subgroup([group.rank % 2, group.rank % 2 + 2])
        large = np.full(3_000_000, 1.0 + group.rank)  # more than the buffers of a connection hold
        line.pass_soon(1 - line.rank, b"", [large])
        total = stage.all_reduce(np.full(200_000, 1.0 + group.rank))
        _, (passed,) = line.passed(1 - line.rank, lambda _: [np.empty(3_000_000)])
        line.flush()
        return [total[0], passed[0]]

    assert succeeded(run_ranks(4, work, share=False)) == [[3.0, 3.0], [3.0, 4.0], [7.0, 1.0], [7.0, 2.0]]


@pytest.mark.parametrize("share", [True, False])
def test_ranks_that_do_not_agree_are_told(share: bool) -> None:
    def work(group: Group) -> None:
        part = group.subgroup([0, 1, 2])
        part.agree("this" if group.rank else "that")
        part.barrier()  # a rank may agree with the one before it

    assert all(isinstance(it, errors.RanksDisagree) for it in run_ranks(3, work, share=share))


def test_a_rank_outside_of_a_subgroup_is_refused() -> None:
    found = run_ranks(2, lambda group: group.subgroup([1 - group.rank]))
    assert all(isinstance(it, errors.BadRequest) for it in found)
