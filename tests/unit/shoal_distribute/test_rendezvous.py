"""Exchanges between threads."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from shoal import errors
from shoal_distribute.rendezvous import Rendezvous


def started(pool: ThreadPoolExecutor, rendezvous: Rendezvous, *calls: tuple[int, str]) -> list["Future[list[Any]]"]:
    return [pool.submit(rendezvous.exchange, replica, what, replica) for replica, what in calls]


def test_all_replicas_get_all_values_in_order_many_times() -> None:
    rendezvous = Rendezvous(3)

    def replica(number: int) -> list[list[Any]]:
        return [rendezvous.exchange(number, f"round {at}", (number, at)) for at in range(50)]

    with ThreadPoolExecutor(3) as pool:
        for got in pool.map(replica, [2, 0, 1]):
            assert got == [[(0, at), (1, at), (2, at)] for at in range(50)]


def test_different_calls_are_named_to_all() -> None:
    with ThreadPoolExecutor(2) as pool:
        for future in started(pool, Rendezvous(2), (0, "reduce"), (1, "gather")):
            with pytest.raises(errors.RanksDisagree, match=r"replica 0: reduce; replica 1: gather"):
                future.result(10)


def test_who_waits_for_a_replica_that_left_gets_its_number() -> None:
    rendezvous = Rendezvous(3)
    with ThreadPoolExecutor(2) as pool:
        waiting = started(pool, rendezvous, (0, "reduce"), (1, "reduce"))
        rendezvous.leave(2, "has returned")
        for future in waiting:
            with pytest.raises(errors.RanksDisagree, match=r"replica 2 has returned while another one waits in reduce"):
                future.result(10)


def test_an_exchange_after_a_replica_left_fails_at_once() -> None:
    rendezvous = Rendezvous(2)
    rendezvous.leave(1, "raised ValueError")
    with pytest.raises(errors.RanksDisagree, match="replica 1 raised ValueError"):
        rendezvous.exchange(0, "reduce", 1)
