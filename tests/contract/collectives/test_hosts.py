"""Collectives of ranks on several hosts: who shares memory, unequal hosts, and the bytes between hosts."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shoal_distribute.collectives import Group
from shoal_distribute.collectives.schedule import slices
from support.ranks import run_ranks, succeeded

SIZES = [0, 1, 7, 300_007]
DTYPES = [np.float32, np.float64, np.int16, ml_dtypes.bfloat16]


def given(rank: int, size: int, dtype: Any) -> np.ndarray[Any, Any]:
    """Returns small whole numbers, whose sums are exact in each dtype."""
    return np.random.default_rng(rank).integers(0, 5, size).astype(dtype)


def counted(group: Group, collective: Callable[[], object]) -> tuple[int, int]:
    """Returns the rounds and the bytes of a rank in a call."""
    rounds, sent = group.rounds, group.sent_bytes
    collective()
    return group.rounds - rounds, group.sent_bytes - sent


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        ([0, 0], ((0, 1),)),
        ([0, 1], ((0,), (1,))),
        ([1, 0, 1, 0], ((0, 2), (1, 3))),
        ([0, 1, 2, 1], ((0,), (1, 3), (2,))),
    ],
)
def test_ranks_share_memory_if_they_can_map_each_other(hosts: list[int], found: tuple[tuple[int, ...], ...]) -> None:
    def work(group: Group) -> tuple[tuple[tuple[int, ...], ...], bool]:
        return group.hosts, group.shares_memory

    assert succeeded(run_ranks(len(hosts), work, hosts=hosts)) == [(found, len(found) == 1)] * len(hosts)


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1, 1], [0, 1, 1, 0, 0, 2]], ids=str)
def test_hosts_may_have_unequal_numbers_of_ranks(hosts: list[int]) -> None:
    ranks = len(hosts)

    def work(group: Group) -> None:
        for size in SIZES:
            for dtype in DTYPES:
                each = np.stack([given(rank, size, dtype) for rank in range(ranks)])
                own, total = each[group.rank], each.astype(np.int64).sum(0)
                np.testing.assert_array_equal(group.all_reduce(own.copy()), total)
            part = group.reduce_scatter(own.copy())
            np.testing.assert_array_equal(part, total[slices(size, ranks)[group.rank]])
            gathered = group.all_gather(own)
            np.testing.assert_array_equal(gathered, each)
            for root in (0, ranks - 1):
                np.testing.assert_array_equal(group.broadcast(own.copy(), root), gathered[root])
            group.barrier()

    succeeded(run_ranks(ranks, work, hosts=hosts))


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1, 2, 2], [0, 1, 1, 2]], ids=str)
def test_each_ring_takes_the_fewest_rounds_and_bytes(hosts: list[int]) -> None:
    array = np.zeros(240_000, np.float32)
    members = 1 + max(hosts)
    rings = min(map(hosts.count, hosts))

    def work(group: Group) -> tuple[tuple[int, int], tuple[int, int]]:
        reduced = counted(group, lambda: group.all_reduce(array.copy()))
        return reduced, counted(group, lambda: group.reduce_scatter(array.copy()))

    fewest = (members - 1) * array.nbytes // members // rings
    for rank, (reduced, scattered) in enumerate(succeeded(run_ranks(len(hosts), work, hosts=hosts))):
        if hosts[:rank].count(hosts[rank]) < rings:
            assert reduced == (2 * (members - 1), 2 * fewest)
            assert scattered[0] == members - 1
            assert rings == 1 or scattered[1] == fewest
        else:
            assert reduced == scattered == (0, 0), "rank 2 of [0, 1, 1, 2] is in no ring"


def test_each_host_gets_a_large_broadcast_once() -> None:
    array = np.arange(300_007.0)

    def work(group: Group) -> int:
        values = array.copy() if group.rank == 3 else array * 0
        _, sent = counted(group, lambda: group.broadcast(values, 3))
        np.testing.assert_array_equal(values, array)
        return sent

    assert sum(succeeded(run_ranks(6, work, hosts=[0, 0, 1, 1, 2, 2]))) == 2 * array.nbytes


def test_ranks_on_one_host_send_nothing_over_connections() -> None:
    def work(group: Group) -> None:
        group.all_gather(group.reduce_scatter(np.ones(300_000)))
        group.broadcast(group.all_reduce(np.ones(3)))
        group.barrier()

    assert succeeded(run_ranks(3, lambda group: counted(group, lambda: work(group)))) == [(0, 0)] * 3
