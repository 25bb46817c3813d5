"""A cluster for the tests of adapters to frameworks. Workers are threads, each with a session of its own."""

import os
from collections.abc import Iterator

import pytest

import shoal
from support.clusters.local import local_cluster


@pytest.fixture(scope="session", autouse=True)
def compiler_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Gives the compiler of PyTorch a folder that is deleted at the end."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture(scope="session")
def client() -> Iterator[shoal.Client]:
    slow = {"coordinator": ["--heartbeat-timeout", "30"]}  # frameworks take all cores while they load
    with local_cluster(servers=2, workers=0, flags=slow) as cluster, cluster.client() as client:
        yield client
