"""Cores among replicas: linear algebra has one share of them while the replicas run, and all of them afterwards."""

from collections.abc import Iterator

import pytest
from threadpoolctl import ThreadpoolController

from shoal_distribute import MirroredStrategy
from shoal_distribute.core_shares import CoreShares


def threads() -> set[int]:
    """Returns the numbers of threads of the libraries of linear algebra."""
    return {it.num_threads for it in ThreadpoolController().lib_controllers if it.user_api == "blas"}


@pytest.fixture(autouse=True)
def _four_threads() -> Iterator[None]:
    with ThreadpoolController().limit(limits=4, user_api="blas"):
        if threads() != {4}:
            pytest.skip("NumPy's library of linear algebra has no threads")
        yield


def test_a_share_is_the_cores_divided_by_the_replicas_and_at_least_one() -> None:
    for replicas, cores, expected in ((2, 4, 2), (3, 4, 1), (8, 4, 1), (2, 16, 4), (1, 2, 4)):
        with CoreShares(replicas, cores).limited():
            assert threads() == {expected}, (replicas, cores)
        assert threads() == {4}


def test_replicas_of_one_process_run_with_their_shares() -> None:
    strategy = MirroredStrategy([f"/cpu:{number}" for number in range(64)])
    assert strategy.experimental_local_results(strategy.run(threads)) == ({1},) * 64
    assert threads() == {4}
