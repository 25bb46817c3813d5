"""Scaling of workers by the number that jobs could use."""

import threading

import pytest

from shoal import errors
from shoal._engines import Autoscaler, WorkerScaling
from support.waiting import wait_until


def test_workers_are_added_at_once_within_the_limits() -> None:
    scaling = WorkerScaling(1, 4)
    assert scaling.change(3, {"worker-0": True}, 0.0) == (2, [])
    assert scaling.change(9, {"worker-0": True}, 0.0) == (3, [])
    assert scaling.change(0, {}, 0.0) == (1, [])


def test_idle_workers_are_removed_after_a_while_the_newest_first() -> None:
    scaling, workers = WorkerScaling(1, 4, idle_s=30), {"worker-0": False, "worker-1": False, "worker-2": False}
    assert scaling.change(1, workers, 0.0) == (0, [])
    assert scaling.change(1, workers, 29.0) == (0, [])
    assert scaling.change(1, workers, 30.0) == (0, ["worker-2", "worker-1"])


def test_a_job_in_between_starts_the_time_again() -> None:
    scaling, workers = WorkerScaling(0, 4, idle_s=30), {"worker-0": False, "worker-1": False}
    assert scaling.change(0, workers, 0.0) == (0, [])
    assert scaling.change(2, workers, 20.0) == (0, [])
    assert scaling.change(0, workers, 31.0) == (0, [])
    assert scaling.change(0, workers, 61.0) == (0, ["worker-1", "worker-0"])


def test_busy_workers_stay() -> None:
    scaling, workers = WorkerScaling(0, 4, idle_s=0), {"worker-0": False, "worker-1": True, "worker-2": True}
    assert scaling.change(1, workers, 0.0) == (0, ["worker-0"])


class Cluster:
    """A cluster whose workers are names."""

    def __init__(self) -> None:
        self.names, self.wanted, self.refusals, self.changed = ["worker-0"], 1, 0, threading.Event()
        self.coming: list[str] = []

    def name(self) -> str:
        self.coming.append(f"worker-{len(self.names) + len(self.coming)}")
        return self.coming[-1]

    def workers(self) -> dict[str, bool]:
        return dict.fromkeys(self.names, False) | dict.fromkeys(self.coming, True)

    def add(self, name: str) -> None:
        self.coming.remove(name)
        if self.refusals:
            self.refusals -= 1
            raise errors.StartFailed("no room")
        self.names.append(name)
        self.changed.set()

    def scaler(self, period_s: float = 0.001) -> Autoscaler:
        return Autoscaler(
            WorkerScaling(1, 3, idle_s=0),
            wanted=lambda: self.wanted,
            workers=self.workers,
            name=self.name,
            add=self.add,
            remove=self.names.remove,
            period_s=period_s,
        )


def test_a_cluster_follows_what_is_wanted() -> None:
    cluster = Cluster()
    scaler = cluster.scaler()
    cluster.wanted = 7
    scaler.look()
    wait_until(lambda: sorted(cluster.names) == ["worker-0", "worker-1", "worker-2"], what="the new workers")
    cluster.wanted = 0
    scaler.look()
    assert cluster.names == ["worker-0"]


def test_a_refused_worker_is_tried_again_by_the_thread() -> None:
    cluster = Cluster()
    cluster.wanted, cluster.refusals = 2, 2
    scaler = cluster.scaler()
    scaler.start()
    assert cluster.changed.wait(10)
    scaler.stop(10)
    assert (cluster.refusals, cluster.names) == (0, ["worker-0", "worker-1"])


def test_workers_are_added_together_and_none_twice_while_others_can_be_removed() -> None:
    cluster, started, room = Cluster(), list[str](), threading.Event()

    def add(name: str) -> None:
        started.append(name)
        assert room.wait(10)
        cluster.add(name)

    scaler = Autoscaler(
        WorkerScaling(0, 3, idle_s=0),
        wanted=lambda: cluster.wanted,
        workers=cluster.workers,
        name=cluster.name,
        add=add,
        remove=cluster.names.remove,
    )
    cluster.wanted = 3
    scaler.look()
    scaler.look()
    wait_until(lambda: sorted(started) == ["worker-1", "worker-2"], what="both additions")
    cluster.wanted = 0
    scaler.look()
    assert (cluster.names, len(started)) == ([], 2)
    room.set()
    wait_until(lambda: len(cluster.names) == 2, what="the new workers")


@pytest.mark.parametrize("error", [RuntimeError("Ray is away"), ValueError("no such actor"), OSError(11, "try again")])
def test_no_exception_ends_the_thread(
    error: Exception, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("structlog.is_configured", lambda: False)  # an earlier test may have done it
    cluster, refused = Cluster(), [error, error]
    scaling = WorkerScaling(1, 3)

    def wanted() -> int:
        if refused:
            raise refused.pop()
        return 2

    scaler = Autoscaler(
        scaling,
        wanted=wanted,
        workers=cluster.workers,
        name=cluster.name,
        add=cluster.add,
        remove=cluster.names.remove,
        period_s=0.001,
    )
    scaler.start()
    assert cluster.changed.wait(10)
    scaler.stop(10)
    assert [str(error) in record.getMessage() for record in caplog.records] == [True], "once, and not at each look"
