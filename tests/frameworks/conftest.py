"""A cluster for the tests of adapters to frameworks. Workers are threads, each with a session of its own."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

import shoal
from support.clusters.local import local_cluster

# The compiler of PyTorch makes its folder when it is imported, and modules of tests import it.
CACHE = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="inductor-")


def pytest_unconfigure() -> None:
    """Deletes the folder of the compiler of PyTorch, in each process of pytest."""
    shutil.rmtree(CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def client() -> Iterator[shoal.Client]:
    slow = {"coordinator": ["--heartbeat-timeout", "30"]}  # frameworks take all cores while they load
    with local_cluster(servers=2, workers=0, flags=slow) as cluster, cluster.client() as client:
        yield client
