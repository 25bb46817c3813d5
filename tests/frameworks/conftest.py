"""A cluster for the tests of adapters to frameworks. Workers are threads, each with a session of its own."""

from collections.abc import Iterator

import pytest

import shoal
from support.clusters.local import local_cluster


@pytest.fixture(scope="session")
def client() -> Iterator[shoal.Client]:
    slow = {"coordinator": ["--heartbeat-timeout", "30"]}  # frameworks take all cores while they load
    with local_cluster(servers=2, workers=0, flags=slow) as cluster, cluster.client() as client:
        yield client
