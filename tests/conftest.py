"""Fixtures of all tests: clusters of real processes on loopback."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Iterator

# Before NumPy is loaded. Each process of the tests has few cores, and threads of OpenBLAS that wait for work take them
# from other processes. Child processes inherit the variable.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import hypothesis
import pytest

import shoal
from shoal import local_cluster as local_clusters
from support.clusters import proxied_cluster
from support.clusters.local import Mended, local_cluster
from support.clusters.shared_forks import SharedForks
from support.run_lengths import draws

# A coordinator that a test starts by its command line has no page: those of several tests would want the same port.
os.environ["SHOAL_PAGE_LISTEN"] = ""

# The first sample of a test may compile or load kernels, and machines differ: no sample has a deadline of its own.
# Coordinators write the tokens of this machine's processes to this folder, not to the one of who runs the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="shoal-tests-state-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

hypothesis.settings.register_profile("shoal", deadline=None, max_examples=draws(40))
hypothesis.settings.load_profile("shoal")


@pytest.fixture(scope="session", autouse=True)
def shared_forks() -> Iterator[None]:
    """Lets the local clusters of this process share a fork server, which takes three seconds to load."""
    forks = SharedForks(os.environ)
    with pytest.MonkeyPatch.context() as patch:
        for clusters in (local_clusters, proxied_cluster):
            patch.setattr(clusters, "ForkServer", forks.lend)
        yield
    forks.end()


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[shoal.LocalCluster]:
    """Yields three servers and four workers, for tests that stop no role."""
    with local_cluster(servers=3, workers=4) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def s3() -> Iterator[str]:
    """Yields the URL of a bucket of a real S3 server. The environment names the server."""
    from support.s3_server import s3_server  # noqa: PLC0415 - it takes a second to load, and few tests want it

    with s3_server() as url:
        yield url


@pytest.fixture
def client(shared_cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    with shared_cluster.client() as client:
        yield client


@pytest.fixture(scope="module")
def mended() -> Iterator[Mended]:
    cluster = Mended(servers=2, workers=2)
    yield cluster
    cluster.stop()


@pytest.fixture
def small_cluster(mended: Mended, request: pytest.FixtureRequest) -> Iterator[shoal.LocalCluster]:
    """Yields two servers and two workers, for tests that kill some. After a failed test, the cluster is replaced."""
    with mended.lent(request.session) as cluster:
        yield cluster


@pytest.fixture
def lone_cluster() -> Iterator[shoal.LocalCluster]:
    """Yields one server and one worker, for tests that add more."""
    with local_cluster(servers=1, workers=1) as cluster:
        yield cluster
