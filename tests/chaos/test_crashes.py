"""Crashes of workers, trainers, servers and the coordinator: accepted work is kept, and failed jobs state a reason."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import shoal
from shoal import errors, optim
from shoal.consistency import Consistency
from shoal.status import MemberStatus
from support import run_lengths
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

TESTS = Path(__file__).parents[1]


@pytest.fixture
def client(small_cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    with small_cluster.client() as client:
        yield client


def gated(gate: str | Path, **options: Any) -> shoal.Job:
    settings: dict[str, Any] = {"gate": str(gate), "size": 256}
    return shoal.Job(
        "support.programs.broken:Gated",
        settings=settings,
        optimizer=optim.SGD(1.0),
        batch_size=8,
        range_size=8,
        **options,
    )


def running(job: shoal.JobHandle) -> Callable[[], bool]:
    return lambda: job.status().state is shoal.JobState.RUNNING


MODES = run_lengths.size(
    [shoal.Synchronous(), shoal.Asynchronous()],
    [shoal.Synchronous(), shoal.Asynchronous(), shoal.BoundedStaleness(1)],
)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_data_of_a_dead_worker_goes_to_another(
    small_cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path, mode: Consistency
) -> None:
    gate = tmp_path / "gate"
    job = client.submit(gated(gate, workers=2, consistency=mode))
    wait_until(running(job), what="the job's start")
    small_cluster.kill("worker", 1)
    gate.touch()
    job.wait(timeout_s=60)
    seen = client.pull(job)["seen"]
    assert seen.min() >= 1, "a sample was never trained on"


def test_every_sample_is_seen_exactly_once_without_deaths(client: shoal.Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    job = client.submit(gated(gate, workers=2, epochs=3))
    job.wait(timeout_s=60)
    np.testing.assert_array_equal(client.pull(job)["seen"], 3)


def test_a_worker_that_comes_back_takes_its_place_again(
    small_cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = client.submit(gated(gate, workers=2))
    wait_until(running(job), what="the job's start")
    small_cluster.restart("worker", 1)
    wait_until(lambda: "worker-1" in job.status().workers, what="the worker's return")
    gate.touch()
    job.wait(timeout_s=60)
    assert client.pull(job)["seen"].min() >= 1


def test_a_trainer_that_crashes_is_replaced_and_the_job_goes_on(client: shoal.Client, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"once": str(tmp_path / "done"), "size": 256}
    job = client.submit(shoal.Job("support.programs.broken:Exits", workers=2, settings=settings, batch_size=8))
    result = job.wait(timeout_s=60)
    assert (tmp_path / "done").exists()
    assert result.progress.samples >= 256


def test_a_trainer_that_hangs_is_replaced_and_the_others_go_on(client: shoal.Client, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"once": str(tmp_path / "hung"), "size": 256}
    spec = shoal.Job(
        "support.programs.broken:Hangs",
        workers=2,
        settings=settings,
        batch_size=8,
        step_timeout_s=1,
        consistency=MODES[0],
    )
    job = client.submit(spec)
    result = job.wait(timeout_s=60)
    assert (tmp_path / "hung").exists()
    assert result.progress.samples >= 256
    reasons = [event.reason for event in job.events(follow=False) if isinstance(event, shoal.events.StateChanged)]
    assert any("it has made no step" in reason for reason in reasons), reasons


def test_a_host_that_kills_every_trainer_costs_the_job_one_worker(client: shoal.Client, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    settings: dict[str, Any] = {"bad": str(tmp_path / "bad"), "gate": str(gate), "size": 256}
    job = client.submit(shoal.Job("support.programs.broken:BadHost", workers=2, settings=settings, batch_size=8))
    wait_until(lambda: "quarantined: worker worker-" in job.status().reason, what="the quarantine")
    gate.touch()
    assert job.wait(timeout_s=60).progress.samples >= 256


def test_suspended_worker_is_fenced_and_does_no_harm(
    small_cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    job = client.submit(gated(gate, workers=2))
    wait_until(running(job), what="the job's start")
    frozen = psutil.Process(small_cluster.process("worker", 1).pid)
    family = [frozen, *frozen.children(recursive=True)]
    for process in family:
        process.suspend()
    wait_until(lambda: not member(client, "worker-1").alive, what="the lease's end")
    for process in family:
        process.resume()
    wait_until(lambda: member(client, "worker-1").alive, what="the worker's new life")
    gate.touch()
    job.wait(timeout_s=60)
    assert client.pull(job)["seen"].min() >= 1


def test_a_worker_killed_in_mid_push_leaves_no_trace(small_cluster: shoal.LocalCluster, client: shoal.Client) -> None:
    """The worker dies when half of its gradient is on the servers. The other worker continues from the same values."""
    variables = {
        "a": shoal.Variable((300_000,), initializer=shoal.initializers.Ones()),
        "b": shoal.Variable((300_000,), initializer=shoal.initializers.Ones()),
    }
    pages = [f"{name}={page}" for name, page in small_cluster.metrics.items()]
    command = [sys.executable, "-m", "support.faults.partial_push", small_cluster.address, "torn", *pages]
    options: dict[str, Any] = {"variables": variables, "optimizer": optim.SGD(1.0), "workers": 2, "shards": 2}
    victims: list[subprocess.Popen[str]] = []

    def start_victim() -> None:
        victims.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS))

    described = once_described(client, "torn", start_victim)
    with client.session("torn", **options) as session:
        described.join()
        (victim,) = victims
        before = session.pull()
        assert victim.stdout
        assert victim.stdout.readline() == "half\n"
        victim.kill()
        victim.wait()
        victim.stdout.close()
        # Waits for the victim's step until it is declared lost, then closes the step with this gradient alone.
        session.push({name: np.full_like(value, 0.25) for name, value in before.items()})
        after = session.pull()
    for value in after.values():
        np.testing.assert_array_equal(value, 0.75)


def test_dead_server_fails_its_jobs_with_the_reason(
    small_cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    job = client.submit(gated(tmp_path / "never", workers=2))
    wait_until(running(job), what="the job's start")
    small_cluster.kill("server", 0)
    with pytest.raises(shoal.JobFailed, match="server-0 is lost"):
        job.wait(timeout_s=60)
    small_cluster.restart("server", 0)
    fine = client.submit(shoal.Job("support.programs.broken:fine", workers=2, optimizer=optim.SGD(1.0), batch_size=8))
    fine.wait(timeout_s=60)


def test_training_goes_on_while_the_coordinator_is_away(
    small_cluster: shoal.LocalCluster, client: shoal.Client
) -> None:
    """Sessions still pull and push. The restarted coordinator knows them and its members as before."""
    with client.session("alone", variables={"w": np.zeros(3)}, optimizer=optim.SGD(1.0)) as session:
        lives = {found.member: found.incarnation for found in client.status().members if found.alive}
        small_cluster.kill("coordinator")
        for _ in range(5):
            session.pull()
            session.push({"w": np.ones(3)})
        np.testing.assert_array_equal(session.pull()["w"], -5.0)
        small_cluster.restart("coordinator")
        assert {found.member: found.incarnation for found in client.status().members if found.alive} == lives
        session.push({"w": np.ones(3)})
    np.testing.assert_array_equal(client.pull("alone")["w"], -6.0)
    assert client.job("alone").result().progress.steps == 6
    fine = client.submit(shoal.Job("support.programs.broken:fine", workers=2, optimizer=optim.SGD(1.0), batch_size=8))
    fine.wait(timeout_s=60)


def test_coordinator_with_memory_store_forgets_its_jobs() -> None:
    """With `--store memory`, members register as new. The first one that learns that a job is gone reports it.

    The new coordinator also has a new key, so a server may refuse the session's ticket before that.
    """
    flags = {"coordinator": ["--heartbeat-timeout", "3", "--heartbeat-interval", "0.2", "--store", "memory"]}
    with (
        shoal.LocalCluster(1, 0, flags=flags) as cluster,
        cluster.client() as client,
        client.session("alone", variables={"w": np.zeros(3)}) as session,
    ):
        cluster.restart("coordinator")
        wait_until(
            lambda: any(found.alive for found in client.status().members if found.member == "server-0"),
            what="the server's return",
        )
        with pytest.raises((shoal.Fenced, shoal.UnknownJob, errors.Unauthenticated)):
            session.push({"w": np.ones(3)})


# `test_up_restarts_a_role_that_dies_and_ends_at_ctrl_c` sends SIGINT, which has the same handler as SIGTERM.
@pytest.mark.parametrize("number", run_lengths.size([signal.SIGKILL], [signal.SIGKILL, signal.SIGTERM]))
def test_nothing_outlives_shoal_up(number: signal.Signals, tmp_path: Path) -> None:
    """However `shoal up` ends while a job runs, no role, trainer or file is left."""
    command = [sys.executable, "-m", "shoal", "up", "--servers", "1", "--workers", "1", "--path", str(TESTS), "--json"]
    up = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", "--page-listen", "127.0.0.1:0"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    assert up.stdout
    address = json.loads(up.stdout.readline())["address"]
    with shoal.Client(address) as client:
        job = client.submit(gated("/nonexistent/gate", workers=1))
        wait_until(running(job), what="the job's start")
    assert list(tmp_path.rglob("coordinator.db"))
    family = psutil.Process(up.pid).children(recursive=True)
    assert len(family) >= 4  # a coordinator, a server, a worker, its trainer
    os.kill(up.pid, number)
    up.wait(timeout=30)
    up.stdout.close()
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive, f"still there: {alive}"
    assert not list(tmp_path.iterdir())


def member(client: shoal.Client, name: str) -> MemberStatus:
    return next(found for found in client.status().members if found.member == name)


def once_described(client: shoal.Client, job: str, act: Callable[[], None]) -> threading.Thread:
    """Starts a thread that calls `act` when the job has been described, while the job's first session still waits."""

    def run() -> None:
        wait_until(lambda: any(status.job.name == job for status in client.jobs()), what="the job")
        wait_until(lambda: client.job(job).status().state is not shoal.JobState.PENDING, what="the first session")
        act()

    thread = threading.Thread(target=run)
    thread.start()
    return thread
