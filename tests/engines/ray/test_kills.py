"""Cluster on Ray whose processes are killed: Ray starts them again under their names, and the job finishes."""

import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import errors, optim
from support import run_lengths
from support.clusters.local import PROGRAMS, QUICK
from support.ray.leftovers import watch_for_leftovers
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos, pytest.mark.timeout(600)]
pytest.importorskip("ray", reason="Ray is not installed")

KILLS = run_lengths.runs(1, 5)
# In slow steps the job takes so long that it never ends before the last kill; the rest of its steps are fast.
BATCH, SIZE, STEP_S, EPOCHS = 8, 1_024, 0.2, 2 + KILLS
# A role that dies ends its actor, so the short form kills the child of one actor.
VICTIMS = [("worker-0", "actor"), ("server-0", "actor"), ("coordinator", "actor"), ("worker-1", "pid")]
VICTIMS += run_lengths.size([], [("server-1", "pid"), ("coordinator", "pid")])


@pytest.fixture(scope="module")
def cluster(ray: Any) -> Iterator[Any]:
    """Yields two servers and two workers, which leave nothing behind although they were killed."""
    module: Any = importlib.import_module("shoal.ray")
    note = watch_for_leftovers(ray, "kills")
    with module.cluster(servers=2, workers=2, path=PROGRAMS, flags=QUICK, name="kills") as cluster:
        yield cluster
        check = note(cluster)
    check()


def paced(gate: Path, name: str) -> shoal.Job:
    """Returns a job that counts its samples. Its steps are slow until the file `gate` exists."""
    return shoal.Job(
        "support.programs.broken:Paced",
        name=name,
        settings={"gate": str(gate), "seconds": STEP_S, "size": SIZE},
        workers=2,
        min_workers=1,
        shards=2,
        replicas=2,
        min_replicas=1,
        optimizer=optim.SGD(1.0),
        consistency=shoal.Asynchronous(),
        batch_size=BATCH,
        range_size=8 * BATCH,
        epochs=EPOCHS,
    )


@contextmanager
def submitted(client: shoal.Client, job: shoal.Job) -> Iterator[shoal.JobHandle]:
    """Yields a job, which is cancelled at the end, so that a failed test leaves the workers to the next one."""
    handle = client.submit(job)
    try:
        yield handle
    finally:
        handle.cancel()


@pytest.mark.parametrize(("victim", "process"), VICTIMS)
def test_the_job_finishes_when_processes_are_killed(cluster: Any, tmp_path: Path, victim: str, process: str) -> None:
    gate, back = tmp_path / "gate", []
    with (
        cluster.client() as client,
        submitted(client, paced(gate, f"{victim}-{process}")) as job,
        run_lengths.count_runs(f"ray_{victim}_{process}_kill", KILLS, "s until the role is back") as counted,
    ):

        def whole() -> bool:
            """Whether all members are alive, and two workers train on two copies of each shard."""
            try:
                status, members = job.status(), client.status().members
            except errors.ShoalError:  # the coordinator is away
                return False
            return status.copies == 2 and [it.alive and it.job == job.name for it in members].count(True) == 2

        wait_until(whole, timeout_s=60, what="two workers and two copies")
        for _ in range(KILLS):
            before, seen = cluster.report(victim), client.pull(job)["seen"].sum()
            os.kill(before[process], signal.SIGKILL)
            killed_at = time.monotonic()
            wait_until(lambda: cluster.report(victim)["pid"] != before["pid"], timeout_s=60, what="the restart")  # noqa: B023
            back.append(time.monotonic() - killed_at)
            wait_until(whole, timeout_s=60, what="the member's return")
            wait_until(lambda: client.pull(job)["seen"].sum() > seen + 8 * BATCH, what="more training")  # noqa: B023
            assert cluster.report(victim)["actor"] != before["actor"]
            counted.passes(back[-1])
        gate.touch()
        job.wait(timeout_s=120)
        seen = client.pull(job)["seen"]
        assert np.all(seen >= EPOCHS), "samples are missing"
        assert job.status().restarts == 0
    repeated = int((seen - EPOCHS).sum())
    print(f"{victim}, {process} killed {KILLS} times; back within {max(back):.1f} s; {repeated} samples repeated")


@run_lengths.long_only
def test_a_job_with_two_copies_survives_the_loss_of_a_node() -> None:
    folder = Path(tempfile.mkdtemp(prefix="n"))  # short, for the paths of Ray's sockets
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_TOKEN"}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, PROGRAMS)), "RAY_AUTH_MODE": "disabled"}
    environment["TMPDIR"] = str(folder)  # Ray writes the address of its latest cluster to the folder `ray` there
    (folder / "ray").mkdir()
    try:
        command = [sys.executable, "-m", "support.ray.node_loss", str(folder)]
        ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
        assert ran.returncode == 0, ran.stderr[-4000:]
        print(f"the server was back on another node after {ran.stdout.split()[-1]} s")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
