"""Workers that join a running job, and workers that leave it."""

import dataclasses
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import shoal
from shoal import _rpc, optim
from shoal.consistency import Consistency
from shoal.events import MetricsReported
from support import run_lengths
from support.waiting import wait_until

pytestmark = pytest.mark.cluster

SIZE = 2_048
MODES: list[Consistency] = run_lengths.size(
    [shoal.Synchronous()], [shoal.Synchronous(), shoal.Asynchronous(), shoal.BoundedStaleness(1)]
)


@pytest.fixture
def cluster(lone_cluster: shoal.LocalCluster) -> shoal.LocalCluster:
    return lone_cluster


@pytest.fixture
def client(cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    with cluster.client() as client:
        yield client


def paced(gate: Path, **options: Any) -> shoal.Job:
    """Returns a job that counts its samples. Its steps are slow until the file `gate` exists."""
    settings: dict[str, Any] = {"gate": str(gate), "seconds": 0.06, "size": SIZE}
    return shoal.Job(
        "support.programs.broken:Paced",
        settings=settings,
        optimizer=optim.SGD(1.0),
        batch_size=4,
        range_size=32,
        **options,
    )


def marks(folder: Path) -> set[Path]:
    """Returns the files that the trainers made in the folder when their first push had been answered."""
    return {entry for entry in folder.iterdir() if entry.name.isdigit()}


def pushed(job: shoal.JobHandle, worker: str) -> Callable[[], bool]:
    """Returns a check whether the job's events show that a worker's push was accepted."""
    return lambda: any(
        isinstance(event, MetricsReported) and event.worker == worker for event in job.events(follow=False)
    )


def test_a_worker_joins_a_running_job_within_seconds(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    """The limit is 3 s, and 10 s in the suite, where other tests run at the same time."""
    settings: dict[str, Any] = {"marks": str(tmp_path), "gate": str(tmp_path / "gate"), "seconds": 0.02, "size": SIZE}
    spec = paced(tmp_path / "gate", max_workers=2, epochs=100, overlap=False)
    job = client.submit(dataclasses.replace(spec, program="support.programs.broken:Marked", settings=settings))
    wait_until(lambda: marks(tmp_path), what="the first worker's push", timeout_s=60)
    [first] = marks(tmp_path)
    start = time.time()
    cluster.add_worker()
    ready_s = time.time() - start
    wait_until(lambda: len(marks(tmp_path)) == 2, what="the second worker's push", timeout_s=30)
    [second] = marks(tmp_path) - {first}
    seconds = second.stat().st_mtime - start
    print(
        f"a worker was ready {ready_s:.2f} s after its process was started, its first push answered at {seconds:.2f} s"
    )
    job.cancel()
    assert seconds < run_lengths.size(10, 3)


@pytest.mark.parametrize("mode", MODES, ids=str)
def test_workers_join_and_leave_and_each_sample_is_visited_once(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path, mode: Consistency
) -> None:
    gate = tmp_path / "gate"
    job = client.submit(paced(gate, max_workers=3, consistency=mode))
    wait_until(pushed(job, "worker-0"), what="the first worker's push")
    newcomer = cluster.add_worker()
    wait_until(pushed(job, "worker-1"), what="the second worker's push", timeout_s=30)
    held = {part.worker for part in job.data().held}
    assert held <= {"worker-0", "worker-1"}
    newcomer.send_signal(signal.SIGTERM)
    wait_until(lambda: newcomer.returncode is not None, what="the second worker's end", timeout_s=30)
    assert newcomer.returncode == 0
    assert "worker-1" not in job.status().workers
    assert job.status().state is shoal.JobState.RUNNING, "it was over before anybody left"
    gate.touch()
    job.wait(timeout_s=60)
    np.testing.assert_array_equal(client.pull(job)["seen"], 1)
    account = job.data()
    assert (account.total.done, account.in_progress, account.held) == (SIZE, {}, ())


@pytest.fixture
def stuck(client: shoal.Client, tmp_path: Path) -> shoal.JobHandle:
    """Returns a running job whose steps never end."""
    settings: dict[str, Any] = {"gate": str(tmp_path / "never"), "size": 64}
    job = client.submit(shoal.Job("support.programs.broken:Gated", settings=settings))
    wait_until(lambda: job.data().held, what="the first range's lease")
    return job


def test_a_second_sigterm_ends_a_worker_at_once(
    cluster: shoal.LocalCluster, client: shoal.Client, stuck: shoal.JobHandle
) -> None:
    worker = cluster.process("worker")
    worker.send_signal(signal.SIGTERM)
    address = next(each.address for each in client.status().members if each.member == "worker-0")
    with _rpc.channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        unready = health_pb2.HealthCheckResponse.NOT_SERVING
        wait_until(lambda: health.Check(request).status == unready, what="the worker's being about to leave")
    assert worker.returncode is None
    start = time.monotonic()
    worker.send_signal(signal.SIGTERM)
    wait_until(lambda: worker.returncode is not None, what="the worker's end")
    print(f"it ended {time.monotonic() - start:.2f} s after the second signal")
    assert worker.returncode == 0
    assert stuck.data().total.requeued == 32, "its range is given back"


def test_a_cluster_is_stopped_without_waiting_for_batches(cluster: shoal.LocalCluster, stuck: shoal.JobHandle) -> None:
    start = time.monotonic()
    cluster.stop()
    seconds = time.monotonic() - start
    print(f"it took {seconds:.2f} s")
    assert seconds < 15
