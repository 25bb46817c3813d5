"""Partitions of each link of a cluster: what is counted is exact, and the job heals by itself.

Without replicas, a server that is declared lost takes its jobs back to a checkpoint. What it acknowledges after that is
not counted, and what it acknowledged before and after the checkpoint is repeated. A job with two copies never goes
back: each acknowledged update stays.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import optim
from support import run_lengths
from support.clusters.proxied_cluster import ProxiedCluster
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

MEMBERS = ("server-0", "server-1", "worker-0", "worker-1")
DATA = [f"{what} of {server}" for server in ("server-0", "server-1") for what in ("calls", "lanes")]
CONTROL = [f"{member} to coordinator" for member in MEMBERS]
# Words in the names of links. In the long form, each link is partitioned at least twice; "server-0" means all of its.
LINKS = run_lengths.size(
    ["server-0 to coordinator", "lanes of server-1"],
    [*CONTROL, *DATA, *CONTROL, *DATA, "server-0", "server-1", "server-0", "worker-1"],
)
HEARTBEAT_TIMEOUT_S, PARTITION_S = run_lengths.size((1.0, 2.0), (3.0, 10.0))
HEALED_WITHIN_S = 5.0
SIZE, BATCH = run_lengths.size(2_048, 8_192), 8
DIRECTIONS = ("both", "requests", "replies")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxiedCluster]:
    saved = ["--checkpoints", str(tmp_path_factory.mktemp("checkpoints"))]
    lease = ["--heartbeat-timeout", str(HEARTBEAT_TIMEOUT_S), "--heartbeat-interval", str(HEARTBEAT_TIMEOUT_S / 6)]
    flags = {"coordinator": [*lease, *saved], "server": saved}
    with ProxiedCluster(2, 2, tmp_path_factory.mktemp("store"), flags=flags) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: ProxiedCluster) -> Iterator[shoal.Client]:
    with cluster.client() as client:
        yield client


def paced(gate: Path, name: str, replicas: int) -> shoal.Job:
    """Returns a job whose steps are slow until the file `gate` exists. It counts its samples."""
    settings: dict[str, Any] = {"gate": str(gate), "seconds": 0.05, "size": SIZE}
    return shoal.Job(
        "support.programs.broken:Paced",
        name=name,
        settings=settings,
        workers=2,
        min_workers=1,
        shards=2,
        replicas=replicas,
        optimizer=optim.SGD(1.0),
        consistency=shoal.Asynchronous(),
        checkpoints=shoal.CheckpointPolicy(every_s=1.0),
        batch_size=BATCH,
        range_size=8 * BATCH,
    )


class Progress:
    """The steps of a job, which fall when the job goes back to a checkpoint."""

    def __init__(self, job: shoal.JobHandle) -> None:
        self._job, self._steps = job, job.status().progress.steps

    def rises(self) -> bool:
        """Whether the job runs, and has made steps since the last call."""
        status = self._job.status()
        before, self._steps = self._steps, status.progress.steps
        return status.state is shoal.JobState.RUNNING and self._steps > before


def are_all_alive(client: shoal.Client) -> bool:
    return {member.member for member in client.status().members if member.alive} >= set(MEMBERS)


def check_result(client: shoal.Client, job: shoal.JobHandle, link: str, rejoined: bool) -> None:
    """Checks that each sample has counted once, or at least once if a worker was declared lost."""
    values = client.pull(job)
    assert values["seen"].sum() == -BATCH * values["w"][0], "a push has counted in part"
    assert np.ptp(values["w"]) == 0
    if link.startswith("worker") and rejoined:
        assert values["seen"].min() >= 1, f"{link}: a sample was never trained on"
    else:
        np.testing.assert_array_equal(values["seen"], 1, f"{link}: a push is lost, or has counted twice")


@pytest.mark.timeout(60 + 40 * len(LINKS))
@pytest.mark.parametrize("replicas", [1, 2])
def test_jobs_heal_after_partitions(
    cluster: ProxiedCluster, client: shoal.Client, tmp_path: Path, replicas: int
) -> None:
    healed, whole = [], []
    with run_lengths.count_runs("partition", len(LINKS), "s until the job makes steps again") as rows:
        for number, link in enumerate(LINKS):
            gate, direction = tmp_path / f"gate-{number}", DIRECTIONS[number % len(DIRECTIONS)]
            job = client.submit(paced(gate, f"partition-{replicas}-{number}", replicas))
            wait_until(Progress(job).rises, what="the first steps")
            wait_for_copies(job, replicas)
            lives = incarnations(client)
            for proxy in cluster.links(link):
                proxy.partition(direction)  # type: ignore[arg-type]  # the literals
            threading.Event().wait(PARTITION_S)  # the length of the partition
            cluster.network.heal()
            healed_at, progress = time.monotonic(), Progress(job)
            wait_until(lambda: are_all_alive(client) and progress.rises(), what=f"the heal of {link}", timeout_s=60)  # noqa: B023
            healed.append(time.monotonic() - healed_at)
            wait_for_copies(job, replicas)
            whole.append(time.monotonic() - healed_at)
            gate.touch()
            job.wait(timeout_s=60)
            changed = {member for member, life in incarnations(client).items() if lives[member] != life}
            print(f"{link}, {direction}: healed in {healed[-1]:.2f} s; began again: {changed}")
            check_result(client, job, link, bool(changed))
            assert replicas == 1 or not job.status().restarts, "it went back to a checkpoint"
            assert healed[-1] < HEALED_WITHIN_S
            client.drop(job)
            rows.passes(healed[-1])
        rows.spreads(f"s until steps, replicas={replicas}", healed)
        rows.spreads(f"s until all copies, replicas={replicas}", whole)
        rows.metrics |= {"pushes lost": 0, "pushes that count twice": 0}


def wait_for_copies(job: shoal.JobHandle, replicas: int) -> None:
    wait_until(lambda: replicas == 1 or job.status().copies == replicas, what="the copies", timeout_s=60)


def incarnations(client: shoal.Client) -> dict[str, int]:
    """Returns the incarnation of each member."""
    return {member.member: member.incarnation for member in client.status().members}
