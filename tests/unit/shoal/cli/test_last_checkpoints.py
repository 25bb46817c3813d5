"""Last checkpoints before `shoal up` stops, without processes: which servers it asks to leave, and what it says."""

import signal
from collections.abc import Iterator
from typing import cast

import pytest

import shoal
from shoal._cli.last_checkpoints import save_jobs
from shoal._cli.output import Output
from shoal.local_cluster import LocalCluster
from shoal.v1 import job_pb2
from support.clusters.fake_coordinator import FakeCoordinator


class Role:
    """A role; a server that gets a signal saves the job, unless it hangs."""

    def __init__(self, role: str, coordinator: FakeCoordinator) -> None:
        self.role, self.signals = role, list[int]()
        self.returncode: int | None = None
        self.hangs = False
        self._coordinator = coordinator

    def send_signal(self, number: int) -> None:
        self.signals.append(number)
        if not self.hangs:
            self._coordinator.jobs["digits"].checkpoint.CopyFrom(job_pb2.Checkpoint(number=4, step=70))
            self._coordinator.enter("digits", "FAILED", "server-0 is about to leave")
            self.returncode = 0


class Cluster:
    def __init__(self, coordinator: FakeCoordinator) -> None:
        self.processes = [Role(role, coordinator) for role in ("coordinator", "server", "worker")]
        self._address = coordinator.address

    def process(self, role: str) -> Role:
        return next(it for it in self.processes if it.role == role)

    def client(self) -> shoal.Client:
        return shoal.Client(self._address, retry_for_s=0)


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        coordinator.add(shoal.Job(name="digits"))
        coordinator.add(shoal.Job(name="done"), "SUCCEEDED")
        yield coordinator


@pytest.fixture
def cluster(coordinator: FakeCoordinator) -> Cluster:
    return Cluster(coordinator)


def save(cluster: Cluster, *, storage: bool = True) -> None:
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    save_jobs(cast(LocalCluster, cluster), Output(as_json=False), storage=storage, clock=lambda: now[0], sleep=sleep)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_the_servers_save_the_jobs_that_train(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    save(cluster)
    assert [it.signals for it in cluster.processes] == [[], [signal.SIGTERM], []]
    told = said(capsys)
    assert "taking a last checkpoint of 1 job (digits), for at most 30 s; Ctrl-C stops at once ..." in told
    assert "job digits: its newest checkpoint is digits/4, step 70" in told


def test_a_server_that_does_not_end_is_not_waited_for_longer(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster.process("server").hangs = True
    save(cluster)
    assert "job digits was not saved within 30 s: it has no checkpoint" in said(capsys)


def test_without_storage_it_says_that_the_work_is_lost(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    save(cluster, storage=False)
    assert cluster.process("server").signals == []
    assert "no checkpoint storage, so the work of 1 job (digits) is lost" in said(capsys)


@pytest.mark.parametrize("why", ["no job trains", "the coordinator is dead", "the coordinator is silent"])
def test_nothing_keeps_a_cluster_from_stopping(
    cluster: Cluster, coordinator: FakeCoordinator, capsys: pytest.CaptureFixture[str], why: str
) -> None:
    if why == "no job trains":
        coordinator.enter("digits", "SUCCEEDED")
    elif why == "the coordinator is dead":
        cluster.process("coordinator").returncode = 1
    else:
        coordinator.stop()
    save(cluster)
    assert cluster.process("server").signals == []
    assert ("could not take last checkpoints" in said(capsys)) == (why == "the coordinator is silent")
