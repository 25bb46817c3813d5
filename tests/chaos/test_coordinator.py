"""Coordinator that is killed by SIGKILL and restarted on its store: no state is lost, and training continues."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import shoal
from shoal import optim
from shoal.status import ClusterStatus
from support import run_lengths
from support.clusters.local import Mended
from support.clusters.supervised import until_ready
from support.scraping import sample
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

# How often the coordinator is killed in one job; 50 for a release.
RUNS = run_lengths.runs(1, 50)
BACK_WITHIN_S = 5.0
BATCH, STEP_S = 8, 0.05
# Steps of one pass: those that two workers take while the coordinator is killed and started once, and many more.
STEPS_A_RUN = 600
MEMBERS = {"server-0", "server-1", "worker-0", "worker-1"}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "coordinator.db"


@pytest.fixture(scope="module")
def mended(store: Path) -> Iterator[Mended]:
    cluster = Mended(servers=2, workers=2, flags={}, store=store)
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(mended: Mended, request: pytest.FixtureRequest) -> Iterator[shoal.LocalCluster]:
    """Yields a cluster of two servers and two workers, with the default heartbeat interval and timeout."""
    with mended.lent(request.session) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    with cluster.client() as client:
        yield client


def paced(gate: Path, steps: int, **options: Any) -> shoal.Job:
    """Returns a job with this number of steps an epoch. Its steps are slow until the file `gate` exists."""
    settings: dict[str, Any] = {"gate": str(gate), "seconds": STEP_S, "size": steps * BATCH}
    return shoal.Job(
        "support.programs.broken:Paced",
        settings=settings,
        workers=2,
        optimizer=optim.SGD(1.0),
        consistency=shoal.Asynchronous(),
        batch_size=BATCH,
        range_size=4 * BATCH,
        **options,
    )


def state_of(job: shoal.JobHandle) -> shoal.JobState:
    return job.status().state


def restart(cluster: shoal.LocalCluster) -> float:
    """Kills the coordinator and starts it again. Returns the time at which it was ready."""
    cluster.kill("coordinator")
    cluster.restart("coordinator")
    return time.monotonic()


def wait_for_members(client: shoal.Client, ready_at: float) -> float:
    """Waits until each member has reported since the coordinator was ready. Returns the seconds from then."""

    def all_reported() -> bool:
        since = time.monotonic() - ready_at  # who has not reported has been silent for longer
        members = client.status().members
        return {member.member for member in members if member.alive and member.silent_s < since} >= MEMBERS

    wait_until(all_reported, timeout_s=2 * BACK_WITHIN_S, what="the members' return")
    return time.monotonic() - ready_at


@pytest.mark.timeout(120 + 30 * RUNS)
def test_nothing_is_lost_when_the_coordinator_is_killed_repeatedly(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    client.submit(shoal.Job("support.programs.broken:fine", name="done", optimizer=optim.SGD(1.0), batch_size=8)).wait()
    steps = STEPS_A_RUN * RUNS
    # Passes, since each push carries an entry for every sample: in one pass, runs would make steps larger, too.
    job = client.submit(paced(gate, STEPS_A_RUN, name="long", epochs=RUNS))
    waiting = client.submit(shoal.Job("support.programs.broken:fine", name="waiting", workers=9))
    wait_until(lambda: state_of(job) is shoal.JobState.RUNNING, what="the job's start")
    before = client.status()
    lives = living(before)
    refused = refusals(cluster)
    away, back = [], []
    with run_lengths.count_runs("coordinator_kill", RUNS, "s until all members are back") as counted:
        for _ in range(RUNS):
            seen = client.pull(job)["seen"].sum()
            killed_at = time.monotonic()
            ready_at = restart(cluster)
            away.append(ready_at - killed_at)
            assert {status.name for status in client.jobs()} == {"done", "long", "waiting"}, "a job was lost"
            assert state_of(job) is shoal.JobState.RUNNING
            back.append(wait_for_members(client, ready_at))
            assert back[-1] < BACK_WITHIN_S
            wait_until(lambda: client.pull(job)["seen"].sum() > seen + 8 * BATCH, what="more training")  # noqa: B023
            counted.passes(back[-1])
        after = client.status()
        assert (after.cluster, after.generation) == (before.cluster, before.generation)
        assert living(after) == lives, "somebody began again"

        assert state_of(client.job("done")) is shoal.JobState.SUCCEEDED
        assert "waiting for workers" in waiting.status().reason
        waiting.cancel()
        gate.touch()
        progress = job.wait(timeout_s=60 + 15 * RUNS).progress
        np.testing.assert_array_equal(client.pull(job)["seen"], RUNS, "the ledger is not exact")
        assert (progress.steps, progress.samples) == (steps, steps * BATCH)
        assert (progress.rejected, progress.dropped) == (0, 0)
        assert refusals(cluster) == refused, "a pull or a push failed"
        entries = [event.reason for event in job.events() if isinstance(event, shoal.events.StateChanged)]
        assert not [reason for reason in entries if "is lost" in reason or "is gone" in reason]
        counted.metrics |= {"jobs lost": 0, "pulls or pushes refused": 0, "steps": steps}
        back_after = counted.spreads("s until all members are back", back)
    print(f"{RUNS} times killed; away for {max(away):.2f} s at most; all members back after {back_after}")
    print(f"{steps} steps, each sample {RUNS} times; no job lost, no push refused, no trainer dead")


def living(status: ClusterStatus) -> dict[str, int]:
    """Returns the incarnations of the members that are alive."""
    return {member.member: member.incarnation for member in status.members if member.alive}


def refusals(cluster: shoal.LocalCluster) -> float:
    """Returns the number of pushes that servers refused, plus the number of trainers that died."""
    return sum(
        sample(cluster.metrics[f"server-{index}"], "shoal_server_rejected_pushes_total")
        + sample(cluster.metrics[f"worker-{index}"], "shoal_worker_trainer_crashes_total")
        for index in (0, 1)
    )


def test_event_stream_survives_a_coordinator_restart(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    """One stream delivers each event once and in order, from before the coordinator's death to the job's end."""
    gate = tmp_path / "gate"
    job = client.submit(paced(gate, 100))
    seen = []
    for event in job.events():
        seen.append(event)
        if isinstance(event, shoal.events.MetricsReported) and not gate.exists():
            restart(cluster)
            gate.touch()
    numbers = [event.sequence for event in seen]
    assert numbers == sorted(set(numbers))
    states = [event.state.value for event in seen if isinstance(event, shoal.events.StateChanged)]
    assert states[-1] == "succeeded"
    assert list(dict.fromkeys(states)) == ["pending", "starting", "placing", "running", "succeeded"]
    again = [event for event in job.events() if isinstance(event, shoal.events.StateChanged)]
    assert [event.state.value for event in again] == states


def test_jobs_whose_servers_are_gone_fail_with_the_reason(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    """All processes are killed, and only the coordinator is started again."""
    job = client.submit(paced(tmp_path / "never", 1_000))
    wait_until(lambda: state_of(job) is shoal.JobState.RUNNING, what="the job's start")
    for role in ("coordinator", "server", "worker"):
        for index in range(1 if role == "coordinator" else 2):
            cluster.kill(role, index)
    cluster.restart("coordinator")
    assert state_of(job) is shoal.JobState.RUNNING, "the servers have their lease's time to come back"
    with pytest.raises(shoal.JobFailed, match="is lost, and with it the last copy of shard"):
        job.wait(timeout_s=30)


def test_a_second_coordinator_on_the_same_store_is_refused(cluster: shoal.LocalCluster, store: Path) -> None:
    command = [sys.executable, "-m", "shoal", "coordinator", "--listen", "127.0.0.1:0", "--store", str(store)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    address, process = cluster.address, cluster.process("coordinator")
    assert done.returncode == 1
    assert f"in use by the coordinator at {address} with process id {process.pid} on" in done.stderr
    assert "STORE_LOCKED" in done.stderr


def test_a_disk_that_is_full_ends_the_coordinator_and_loses_nothing(
    cluster: shoal.LocalCluster, client: shoal.Client, store: Path, tmp_path: Path
) -> None:
    with run_lengths.count_runs("full_disk", 1, "s until training goes on") as counted:
        gate = tmp_path / "gate"
        job = client.submit(paced(gate, 200))
        wait_until(lambda: state_of(job) is shoal.JobState.RUNNING, what="the job's start")
        process = cluster.process("coordinator")
        log = store.with_name("coordinator.db-wal")
        # The kernel refuses to let its files grow, as a full disk does.
        psutil.Process(process.pid).rlimit(psutil.RLIMIT_FSIZE, (log.stat().st_size, log.stat().st_size))
        wait_until(lambda: process.returncode is not None, what="the coordinator's end")
        assert process.returncode == 1
        assert f"cannot write the store {store}" in process.tail()
        assert "disk is full" in process.tail()
        began = time.monotonic()
        cluster.restart("coordinator")
        gate.touch()
        progress = job.wait(timeout_s=60).progress
        assert progress.steps == 200
        np.testing.assert_array_equal(client.pull(job)["seen"], 1)
        counted.passes(time.monotonic() - began)


@pytest.mark.parametrize("damage", ["newer", "torn"])
def test_a_store_that_cannot_be_read_is_left_alone(tmp_path: Path, damage: str) -> None:
    store = tmp_path / "coordinator.db"
    command = [sys.executable, "-m", "shoal", "coordinator", "--listen", "127.0.0.1:0", "--store", str(store)]
    until_ready(command)
    content = bytearray(store.read_bytes())
    if damage == "newer":
        content[60:64] = (99).to_bytes(4, "big")  # where SQLite's format has the user's version
    else:
        content[4096:] = b"\xff" * (len(content) - 4096)
    store.write_bytes(content)
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "STORE_UNREADABLE" in done.stderr
    assert str(store) in done.stderr
    assert ("newer version" if damage == "newer" else "copy of it") in done.stderr
    assert store.read_bytes() == content
