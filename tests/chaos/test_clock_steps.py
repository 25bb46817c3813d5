"""Wall clocks of roles that are five minutes off, from the start or by a step in mid-run: nobody is declared lost."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import optim
from support import run_lengths
from support.clusters.local import local_cluster
from support.faults.wall_clocks import WallClocks
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

ROLES = ("coordinator", "server-0", "server-1", "worker-0", "worker-1")
OFF_S, HEARTBEAT_TIMEOUT_S = 300.0, run_lengths.size(1.2, 3.0)
# Role, seconds ahead, and whether it starts with this clock.
CASES = run_lengths.size(
    [("coordinator", -OFF_S, False), ("coordinator", OFF_S, True), ("server-0", OFF_S, False)],
    [(role, off_s, starts) for role in ROLES[::2] for off_s in (OFF_S, -OFF_S) for starts in (False, True)],
)
SIZE, BATCH = 2_048, 8


@pytest.fixture(scope="module")
def clocks(tmp_path_factory: pytest.TempPathFactory) -> WallClocks:
    return WallClocks(tmp_path_factory.mktemp("clocks"), ROLES)


@pytest.fixture(scope="module")
def cluster(clocks: WallClocks) -> Iterator[shoal.LocalCluster]:
    timeout = ["--heartbeat-timeout", str(HEARTBEAT_TIMEOUT_S), "--heartbeat-interval", str(HEARTBEAT_TIMEOUT_S / 6)]
    with local_cluster(2, 2, {"coordinator": timeout, **clocks.flags}, env=clocks.environment) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    with cluster.client() as client:
        yield client


def test_the_clock_of_one_role_is_stepped(cluster: shoal.LocalCluster, clocks: WallClocks, tmp_path: Path) -> None:
    """The tests below would pass if no clock were stepped."""
    clocks.set("coordinator", OFF_S)
    with cluster.client() as client:
        job = client.submit(paced(tmp_path, "stepped"))
        cluster.restart("coordinator")  # its clock never jumps while it runs
        event = next(iter(job.events()))
        late = client.submit(paced(tmp_path, "late"))
        assert next(iter(late.events())).time > event.time + OFF_S / 2
        job.cancel()
        late.cancel()
    clocks.reset()
    cluster.restart("coordinator")


def alive(client: shoal.Client) -> dict[str, int]:
    """Returns the incarnations of the members that are alive."""
    return {member.member: member.incarnation for member in client.status().members if member.alive}


@pytest.mark.timeout(60 + 20 * len(CASES))
def test_a_wall_clock_that_is_off_changes_nothing(
    cluster: shoal.LocalCluster, client: shoal.Client, clocks: WallClocks, tmp_path: Path
) -> None:
    with run_lengths.count_runs("clock_step", len(CASES), "members declared lost") as rows:
        for number, (role, off_s, starts) in enumerate(CASES):
            if starts:
                clocks.set(role, off_s)
                cluster.restart(*split(role))
                wait_until(lambda: alive(client).keys() == set(ROLES[1:]), what="the members")
            folder = tmp_path / f"{number}"
            folder.mkdir()
            job = client.submit(paced(folder, f"clock-{number}"))
            wait_until(lambda: job.status().progress.steps, what="the first steps")  # noqa: B023
            lives, begun = alive(client), time.monotonic()
            clocks.set(role, off_s)
            wait_until(lambda: time.monotonic() > begun + HEARTBEAT_TIMEOUT_S + 1, what="the heartbeat timeout")  # noqa: B023
            before = job.status().progress.steps
            wait_until(lambda: job.status().progress.steps > before, what="more steps")  # noqa: B023
            with cluster.client() as other:  # it needs a token, and a ticket that the servers accept
                assert other.pull(job)["seen"].any()
            assert alive(client) == lives, f"{role} {off_s:+.0f} s: a member was declared lost"
            (folder / "gate").touch()
            job.wait(timeout_s=60)
            np.testing.assert_array_equal(client.pull(job)["seen"], 1, f"{role} {off_s:+.0f} s")
            clocks.reset()
            client.drop(job)
            rows.passes(0.0)


def split(role: str) -> tuple[str, int]:
    """Returns the kind of a role and its number."""
    kind, _, number = role.partition("-")
    return kind, int(number or 0)


def paced(gate: Path, name: str) -> shoal.Job:
    """Returns a job whose steps are slow until the file `gate` exists. It counts its samples."""
    settings: dict[str, Any] = {"gate": str(gate / "gate"), "seconds": 0.05, "size": SIZE}
    return shoal.Job(
        "support.programs.broken:Paced",
        name=name,
        settings=settings,
        workers=2,
        shards=2,
        optimizer=optim.SGD(1.0),
        consistency=shoal.Asynchronous(),
        batch_size=BATCH,
        range_size=8 * BATCH,
    )
