"""Sums by NCCL between the ranks of a group, over real connections and a fake of NCCL."""

import threading
import types
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pytest

from shoal import errors, optim
from shoal_distribute import (
    DistributedVariable,
    Group,
    MultiWorkerMirroredStrategy,
    ReduceOp,
    devices,
    get_replica_context,
)
from shoal_distribute.collectives import CommunicationOptions, NcclSums, open_nccl
from shoal_worker.arrays import Cpu
from support.devices.fake_nccl import fake_cupy
from support.ranks import run_ranks, succeeded

T = TypeVar("T")
NCCL, RING = CommunicationOptions(implementation="nccl"), CommunicationOptions(implementation="ring")
BUSES = [f"0000:0{number}:00.0" for number in range(3)]


def with_sums(ranks: int, cupy: Any, work: Callable[[Group, NcclSums], T], **options: Any) -> list[T | BaseException]:
    def run(group: Group) -> T:
        sums = open_nccl(group, CommunicationOptions(**options), cupy, group.rank)
        assert sums
        try:
            return work(group, sums)
        finally:
            sums.close()

    return run_ranks(ranks, run)


@pytest.mark.parametrize("signed_ids", [False, True], ids=["CuPy 14", "CuPy 13"])
@pytest.mark.parametrize("pack", [1, 1 << 20])
def test_sums_are_those_of_all_ranks_in_each_step(signed_ids: bool, pack: int) -> None:
    cupy = fake_cupy(buses=BUSES, signed_ids=signed_ids)

    def work(group: Group, sums: NcclSums) -> list[tuple[str, bytes]]:
        found: list[tuple[str, bytes]] = []
        for step in range(3):
            sums.add("b", np.full((2, 3), group.rank + step, np.float32))
            sums.add("a", np.array(10 * group.rank, np.int64))
            found += [(name, array.tobytes()) for name, array in sums.finish().items()]
        return found

    of_b = [np.full((2, 3), 3 + 3 * step, np.float32).tobytes() for step in range(3)]
    wanted = [it for b in of_b for it in (("b", b), ("a", np.int64(30).tobytes()))]
    assert succeeded(with_sums(3, cupy, work, bytes_per_pack=pack)) == [wanted] * 3
    assert [it.destroyed for it in cupy.communicators] == [True] * 3


def test_arrays_are_summed_before_the_last_one_is_added() -> None:
    cupy = fake_cupy(buses=BUSES)

    def work(group: Group, sums: NcclSums) -> None:
        sums.add("first", np.ones(4))
        group.barrier()
        assert [len(it.world.done) for it in cupy.communicators] == [1, 1]
        group.barrier()
        sums.finish()

    succeeded(with_sums(2, cupy, work, bytes_per_pack=32))


def test_ranks_that_add_other_arrays_are_told_so() -> None:
    cupy = fake_cupy(buses=BUSES)

    def work(group: Group, sums: NcclSums) -> None:
        sums.add("w", np.ones(2 + group.rank))
        if group.rank == 0:
            sums.add("b", np.ones(1))
        sums.finish()

    for error in with_sums(2, cupy, work):
        assert isinstance(error, errors.RanksDisagree)
        assert "'w'" in error.message
    assert all(it.aborted for it in cupy.communicators)


def test_a_step_that_one_rank_abandons_does_not_join_with_its_next_one() -> None:
    def work(group: Group, sums: NcclSums) -> None:
        for step in range(2):
            sums.add("w", np.ones(4))
            if group.rank == 0 and step == 0:
                sums.abandon()
            else:
                sums.finish()

    for error in with_sums(2, fake_cupy(buses=BUSES), work, bytes_per_pack=1):
        assert isinstance(error, errors.RanksDisagree | errors.RankLost)


def test_a_rank_that_ends_ends_the_step_of_the_others() -> None:
    cupy = fake_cupy(buses=BUSES)

    def work(group: Group, sums: NcclSums) -> None:
        if group.rank == 1:
            return
        sums.add("w", np.ones(4))
        sums.finish()

    first, second = with_sums(2, cupy, work)
    assert isinstance(first, errors.RankLost)
    assert "rank 1" in first.message
    assert second is None
    assert {it.rank for it in cupy.communicators if it.aborted} == {0}


def test_a_failure_of_nccl_ends_all_ranks() -> None:
    cupy = fake_cupy(buses=BUSES)

    def work(group: Group, sums: NcclSums) -> None:
        group.barrier()
        if group.rank == 0:
            own = next(it for it in cupy.communicators if it.rank == 0)
            own.failure = cupy.cuda.nccl.NcclError("NCCL_ERROR_SYSTEM_ERROR: a cable is gone")
            own.world.ranks = 3  # the sum never ends
        group.barrier()
        sums.add("w", np.ones(4))
        sums.finish()

    for error in with_sums(2, cupy, work):
        assert isinstance(error, errors.InternalError | errors.RankLost)
        assert "a cable is gone" in error.message


def test_names_and_dtypes_are_checked() -> None:
    def work(group: Group, sums: NcclSums) -> None:
        sums.add("w", np.ones(2))
        with pytest.raises(errors.BadRequest, match="'w' was added twice"):
            sums.add("w", np.ones(2))
        with pytest.raises(errors.BadRequest, match="NCCL cannot add complex128; give one of float32, float64, int64"):
            sums.add("c", np.ones(2, np.complex128))
        assert [*sums.finish()] == ["w"]
        assert sums.finish() == {}

    succeeded(with_sums(2, fake_cupy(buses=BUSES), work))


HERE = threading.local()


@pytest.mark.parametrize(
    ("cupys", "hosts", "reason"),
    [
        ([fake_cupy(buses=["a"] * 2)] * 2, ["x", "x"], "ranks 0 and 1 have the same GPU"),
        ([fake_cupy(buses=BUSES), None], ["x", "x"], "rank 1 computes on a CPU"),
        ([fake_cupy(buses=BUSES), fake_cupy(buses=BUSES, version=1)], ["x", "x"], "rank 1 has NCCL 1, and rank 0"),
        ([fake_cupy(buses=BUSES)] * 2, ["x", "y"], ""),
    ],
)
def test_ranks_that_cannot_use_nccl_use_the_ring_unless_they_are_told_otherwise(
    cupys: list[Any], hosts: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal_distribute.collectives.nccl.host_id", lambda: HERE.host)

    def work(group: Group) -> str:
        HERE.host = hosts[group.rank]
        cupy = cupys[group.rank]
        assert open_nccl(group, CommunicationOptions(), cupy, group.rank) is None
        assert open_nccl(group, RING, cupy, group.rank) is None
        try:
            sums = open_nccl(group, NCCL, cupy, group.rank)
        except errors.DeviceUnavailable as error:
            return error.message
        assert sums
        sums.close()
        return ""

    for message in succeeded(run_ranks(2, work)):
        assert reason in message
        assert bool(message) is bool(reason)


class FakeGpu(Cpu):
    def __init__(self, cupy: types.ModuleType) -> None:
        self.xp = cupy


def test_a_strategy_joins_gradients_and_values_on_gpus_by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    cupy = fake_cupy(buses=BUSES)
    monkeypatch.setattr(devices, "choose_device", lambda _: FakeGpu(cupy))

    def run(group: Group) -> tuple[bytes, list[float], int]:
        strategy = MultiWorkerMirroredStrategy(devices=[f"/gpu:{group.rank}"], group=group)
        weights, optimizer = strategy.create_variable("w", np.zeros(3)), optim.SGD(1.0)
        joined: list[float] = []

        def step(scale: float) -> Any:
            gradients: list[tuple[np.ndarray, DistributedVariable]] = [(np.full(3, scale), weights)]
            strategy.apply_gradients(optimizer, gradients)
            replica = get_replica_context()
            assert replica
            joined.append(float(replica.all_reduce(ReduceOp.MEAN, np.array(scale))))
            return scale

        for _ in range(2):
            strategy.run(step, (group.rank + 1.0,))
        calls = sum(it.calls for it in cupy.communicators if it.rank == group.rank)
        values = weights.numpy().tobytes()
        strategy.close()
        return values, joined, calls

    results = succeeded(run_ranks(2, run))
    assert results == [(np.full(3, -6.0).tobytes(), [1.5, 1.5], 4)] * 2
    assert all(it.destroyed for it in cupy.communicators)


@pytest.mark.parametrize("given", [{"bytes_per_pack": -1}, {"implementation": "gloo"}])
def test_options_are_checked(given: dict[str, Any]) -> None:
    with pytest.raises(errors.BadRequest):
        CommunicationOptions(**given)
