"""Clusters of real processes on loopback, with settings for tests."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import shoal

ROOT = Path(__file__).parents[3]
PROGRAMS = [ROOT / "tests", ROOT / "examples"]
# Fast enough for tests to see deaths; slow enough for a machine that is busy with other tests. Heartbeats have the
# default interval. They are most of what a cluster costs between two jobs, and some clusters live as long as all tests.
QUICK = {"coordinator": ["--heartbeat-timeout", "3"]}


def local_cluster(
    servers: int, workers: int, flags: Mapping[str, Sequence[str]] = QUICK, **options: Any
) -> shoal.LocalCluster:
    return shoal.LocalCluster(servers=servers, workers=workers, path=PROGRAMS, flags=flags, **options)


class Mended:
    """A cluster for tests that kill its roles. Each test gets it repaired, which is faster than a new cluster.

    Args:
        servers: number of servers.
        workers: number of workers.
        options: further arguments of `local_cluster`.
    """

    def __init__(self, servers: int, workers: int, **options: Any) -> None:
        self._size, self._options = (servers, workers), options
        self._cluster: shoal.LocalCluster | None = None

    def whole(self) -> shoal.LocalCluster:
        """Returns the cluster with all roles alive and without earlier jobs."""
        if self._cluster is None:
            cluster = local_cluster(*self._size, **self._options)
            cluster.start()
            self._cluster = cluster
        for process in self._cluster.processes:
            if process.returncode is not None:
                self._cluster.restart(process.role, process.index)
        with self._cluster.client() as client:
            for status in client.jobs():
                client.cancel(status.job.name)
                client.drop(status.job.name)
        return self._cluster

    @contextmanager
    def lent(self, session: pytest.Session) -> Iterator[shoal.LocalCluster]:
        """Yields the whole cluster to one test. After a failed test, the next test gets a new cluster."""
        failed = session.testsfailed
        try:
            cluster = self.whole()
        except shoal.ShoalError:
            self.stop()
            raise
        yield cluster
        if session.testsfailed > failed:
            self.stop()

    def stop(self) -> None:
        """Ends the cluster. The next call of `whole` starts a new one."""
        if self._cluster:
            self._cluster.stop()
            self._cluster = None
