"""Clusters of real processes on loopback, with settings for tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import shoal

ROOT = Path(__file__).parents[3]
PROGRAMS = [ROOT / "tests", ROOT / "examples"]
# Fast enough for tests to see deaths; slow enough for a machine that is busy with other tests.
QUICK = {"coordinator": ["--lease", "3", "--heartbeat", "0.2"]}


def local_cluster(
    servers: int, workers: int, flags: Mapping[str, Sequence[str]] = QUICK, **options: Any
) -> shoal.LocalCluster:
    return shoal.LocalCluster(servers=servers, workers=workers, path=PROGRAMS, flags=flags, **options)


class Mended:
    """One cluster for tests that kill some of it; each gets it whole. To mend one is quicker than to start one.

    Args:
        servers: how many it has.
        workers: how many.
    """

    def __init__(self, servers: int, workers: int) -> None:
        self._size = (servers, workers)
        self._cluster: shoal.LocalCluster | None = None

    def whole(self) -> shoal.LocalCluster:
        """The cluster, with every role alive and none of the jobs that there were."""
        if self._cluster is None:
            cluster = local_cluster(*self._size)
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

    def stop(self) -> None:
        """Ends it; the next one is new."""
        if self._cluster:
            self._cluster.stop()
            self._cluster = None
