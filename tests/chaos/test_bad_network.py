"""Pushes over a bad network, through proxies: each acknowledged push counts exactly once.

Gradients are ones and the rate is 1, so each value is minus the number of updates that were applied.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

import shoal
from support import run_lengths
from support.clusters.proxied_cluster import SESSIONS, ProxiedCluster
from support.scraping import sample

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedCluster]:
    with ProxiedCluster(2, 2, tmp_path_factory.mktemp("store"), flags={"coordinator": ["--heartbeat-timeout", "3"]}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: ProxiedCluster) -> Iterator[shoal.Client]:
    with cluster.client() as client:
        yield client
        cluster.network.heal()


def counted(cluster: ProxiedCluster, name: str) -> float:
    """Returns a counter of the servers, summed over all of them."""
    return sum(sample(cluster.processes[server].metrics, name) for server in ("server-0", "server-1"))


# Sessions, processes, and pushes of each session.
DROPPING: tuple[int, int, int] = run_lengths.size((2, 1, 60), (16, 4, 6_250))


@pytest.mark.timeout(380)
@pytest.mark.parametrize("transport", ["tcp", "grpc"])
def test_pushes_count_once_when_replies_are_dropped(cluster: ProxiedCluster, client: shoal.Client, transport: str) -> None:
    sessions, processes, pushes = DROPPING
    if transport == "grpc" and run_lengths.is_long():
        pushes //= 10
    job, share = f"dropped-{transport}", 0.1
    links = cluster.links(SESSIONS, " of server")
    for link in links:
        link.drop_replies(share)
    arguments = [cluster.network[SESSIONS].address, job, str(sessions), str(sessions // processes), str(pushes)]
    with run_lengths.count_runs("dropped_replies", sessions * pushes, "pushes lost or applied twice") as rows:
        acknowledged = run_sessions(processes, arguments, transport)
        for link in links:
            link.heal()
        values = client.pull(job)
        for value in values.values():
            np.testing.assert_array_equal(value, -float(sum(acknowledged)))
        assert acknowledged == [pushes] * sessions
        rows.passes(0.0, sessions * pushes)
    dropped, replies = sum(link.counts.dropped for link in links), sum(link.counts.replies for link in links)
    repeated = counted(cluster, "shoal_server_duplicate_pushes_total")
    print(f"{transport}: {sum(acknowledged)} pushes; {dropped} of {replies} replies dropped; {repeated:.0f} recognised")
    assert repeated, "no push was repeated"


def run_sessions(processes: int, arguments: Sequence[str], transport: str) -> list[int]:
    """Runs processes with sessions. Returns the number of acknowledged pushes of each session."""
    command = [sys.executable, "-m", "support.programs.counted_pushes", *arguments]
    environment = {**os.environ, "SHOAL_TRANSPORT": transport}
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS, env=environment)
        for _ in range(processes)
    ]
    try:
        outputs = [process.communicate()[0] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    assert [process.returncode for process in running] == [0] * processes
    return [int(line) for output in outputs for line in output.splitlines()]
