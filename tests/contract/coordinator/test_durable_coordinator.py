"""Coordinator that restarts on its store, over real gRPC: it restores its state, and makes pending calls to servers."""

import os
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
from structlog.testing import capture_logs

from shoal import errors
from shoal.events import StateChanged, watch
from shoal.status import JobState
from shoal.v1 import job_pb2 as jobs
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.persistence.sqlite_store import SqliteStore
from shoal_coordinator.process import CoordinatorConfig, CoordinatorProcess, start_coordinator
from support.clusters.coordinator_rig import Rig, job
from support.waiting import wait_until


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "coordinator.db"


@pytest.fixture
def rig(store: Path) -> Iterator[Rig]:
    rig = Rig(str(store))
    try:
        yield rig
    finally:
        rig.stop()


def test_all_that_was_answered_is_known_again(group: Rig) -> None:
    group.run(job(epochs=3, range_size=32), "w0", "w1")
    held = group.job("Lease", job="a", worker="w1").range
    group.job("Report", job="a", worker="w0", accepted=4, samples=32)
    placement = group.job("GetPlacement", job="a")
    assignment = group.beat("w0").assignment
    before = group.member_status()
    group.restart()
    assert group.job("GetPlacement", job="a") == placement
    assert group.state("a") is JobState.RUNNING
    assert group.beat("w0").assignment == assignment
    assert {name: member.incarnation for name, member in group.member_status().items()} == group.lives
    assert {name: member.metrics_address for name, member in before.items()} == {
        name: member.metrics_address for name, member in group.member_status().items()
    }
    assert group.job("Lease", job="a", worker="w1").range == held
    assert not group.job("Report", job="a", worker="w0", accepted=4, samples=32).done
    assert group.job("Get", job="a").status.progress.steps == 4
    for worker in ("w0", "w1"):
        group.job("Finish", job="a", worker=worker)
    group.restart()
    assert group.state("a") is JobState.SUCCEEDED


def test_restart_makes_the_pending_calls_to_servers(group: Rig) -> None:
    """The coordinator ends during a call that admits a worker. The next coordinator repeats the call and continues."""
    held = group.notes["s0"].holds["AdmitWorkers"] = threading.Event()
    group.submit(job(workers=1))
    group.describe("a", "w0")

    def asked() -> list[pb.AdmitWorkersRequest]:
        group.job("Join", job="a", worker="w0")
        return group.notes["s0"].of(pb.AdmitWorkersRequest)

    wait_until(asked, what="the server's being asked")
    stopping = threading.Thread(target=group.process.stop)
    stopping.start()
    held.set()
    stopping.join()
    group.restart()
    assert group.join("a", "w0").ready
    first, *again = group.notes["s0"].of(pb.AdmitWorkersRequest)
    assert all(request == first for request in again)
    assert len(group.notes["s1"].of(pb.CreateShardsRequest)) == 1, "what was known to be done is not done again"


def test_unwritable_checkpoint_folder_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder, error, said in (
        (tmp_path / "file", errors.StorageFailed, "is not a folder"),
        (tmp_path / "file" / "below", errors.StorageFailed, "a part of its path, is not a folder"),
        ("memory://x", errors.BadRequest, "choose a folder that the coordinator and all servers share"),
    ):
        config = CoordinatorConfig(listen="127.0.0.1:0", store=str(tmp_path / "db"), checkpoints=str(folder))
        for _ in range(2):  # and nothing is left of it
            with pytest.raises(error, match=said):
                start_coordinator(config, prometheus_client.CollectorRegistry())


def test_a_coordinator_that_has_jobs_comes_back_though_its_folder_cannot_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    rig = Rig(str(tmp_path / "db"), str(folder))
    try:
        assert [*folder.iterdir()] == []
        rig.submit(job())
        folder.rmdir()
        folder.touch()
        rig.restart()
        assert rig.state("a") is JobState.PENDING
        rig.job("Cancel", job="a")
        with pytest.raises(errors.StorageFailed, match="is not a folder"):
            rig.restart()
    finally:
        rig.stop()


def test_a_worker_is_released_as_it_was_fenced(group: Rig) -> None:
    """The coordinator ends between the two. The next one must not ask again: one server has released the worker."""
    group.run(job(workers=1), "w0")
    group.notes["s1"].fails["ReleaseWorkers"] = errors.Unreachable("not now")
    group.job("Finish", job="a", worker="w0")
    wait_until(lambda: group.notes["s1"].of(pb.ReleaseWorkersRequest), what="the attempt")
    for notes in group.notes.values():
        notes.step = 0  # as servers say that know the worker no more
    group.notes["s1"].fails.clear()
    group.restart()
    wait_until(lambda: not pending_effects(group), what="the end of it")
    for notes in group.notes.values():
        assert len(notes.of(pb.FenceWorkersRequest)) == 1
        released = [worker for request in notes.of(pb.ReleaseWorkersRequest) for worker in request.workers]
        assert {worker.committed_steps for worker in released} == {5}


def pending_effects(rig: Rig) -> list[Any]:
    """Returns the effects whose outcome is not known."""
    with rig.process.coordinator.reading() as (machine, _):
        return machine.pending_effects


def test_watching_continues_after_the_last_event_seen(group: Rig) -> None:
    group.submit(job(workers=3))
    stream = watch(group.client, "a", timeout_s=20)
    seen = [next(stream), next(stream)]
    group.restart()
    group.job("Cancel", job="a")
    seen += stream
    assert [event.state for event in seen if isinstance(event, StateChanged)][-1] is JobState.CANCELLED
    numbers = [event.sequence for event in seen]
    assert numbers == sorted(set(numbers))
    assert [event.sequence for event in watch(group.client, "a", follow=False)] == numbers


def test_a_store_that_is_in_use(rig: Rig, store: Path) -> None:
    """The second coordinator's error has the first one's address. It leaves nothing behind, and the first continues."""
    held = rf"the store {store} is in use by the coordinator at {rig.process.address} with process id {os.getpid()} on"
    for _ in range(2):
        with pytest.raises(errors.StoreLocked, match=f"{held}.*: stop that coordinator, or start .* another --store"):
            start_coordinator(CoordinatorConfig(listen="127.0.0.1:0", store=str(store)), rig.registry)
    assert rig.submit(job(workers=3)).state == jobs.PENDING


def test_volumes_that_are_not_there(tmp_path: Path) -> None:
    """The coordinator creates neither folder, because a folder inside the container would be lost with it."""
    missing = tmp_path / "volume"
    given: list[tuple[dict[str, Any], type[errors.ShoalError]]] = [
        ({"store": str(missing / "coordinator.db")}, errors.StoreFailed),
        ({"store": "memory", "checkpoints": str(missing)}, errors.StorageFailed),
    ]
    for options, error in given:
        with pytest.raises(error, match=f"{missing}.*there is no such folder: create it, or mount its volume"):
            start_coordinator(CoordinatorConfig(listen="127.0.0.1:0", **options), prometheus_client.CollectorRegistry())
    assert not missing.exists()


def started(store: Path, *, secure: bool) -> CoordinatorProcess:
    config = CoordinatorConfig(listen="127.0.0.1:0", store=str(store), secure=secure)
    return start_coordinator(config, prometheus_client.CollectorRegistry())


def test_a_store_with_tokens_is_not_opened_without_them(store: Path) -> None:
    started(store, secure=True).stop()
    with pytest.raises(errors.BadRequest, match=f"{store} .*asks for tokens, and with --insecure everybody could"):
        started(store, secure=False)
    started(store, secure=True).stop()  # it is neither locked nor changed


def test_jobs_that_were_submitted_without_tokens_are_named_when_tokens_are_needed(rig: Rig, store: Path) -> None:
    rig.submit(job(workers=3))
    rig.process.stop()
    with capture_logs() as logged:
        started(store, secure=True).stop()
        started(store, secure=True).stop()  # the second time, that is known
    warnings = [entry for entry in logged if entry["event"] == "the store has jobs that were submitted without tokens"]
    assert [entry["log_level"] for entry in warnings] == ["warning"]


def test_a_store_that_contradicts_itself_is_named(store: Path) -> None:
    kept = SqliteStore(store)
    kept.apply({"cluster": b"", "job/1/spec": b""})
    kept.close()
    for _ in range(2):  # and is not left locked
        with pytest.raises(errors.StoreUnreadable, match=f"{store}.*no name"):
            Rig(str(store))


def test_reply_is_not_sent_before_its_change_is_stored(group: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The store fails: the coordinator logs it once and answers no more calls. A restart knows all earlier answers."""
    group.submit(job("kept", workers=3))
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def noted(*given: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*given, **options))
        return opened[-1]

    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", noted)
        group.restart()
    group.job("List")  # the client has found the new coordinator
    opened[-1].execute("PRAGMA query_only = 1")
    with pytest.raises(errors.Unreachable, match="cannot write the store"):
        group.client.call(group.client.jobs.Submit, jobs.SubmitRequest(spec=job("lost").to_proto()), retry_for_s=0)
    wait_until(lambda: group.failures, what="the failure's being told")
    assert isinstance(group.failures[0], errors.StoreFailed)
    with pytest.raises(errors.Unreachable, match="has stopped"):
        group.client.call(group.client.jobs.List, jobs.ListRequest(), retry_for_s=0)
    group.restart()
    assert {status.spec.name for status in group.job("List").jobs} == {"kept"}


def test_metrics_tell_of_the_store(group: Rig) -> None:
    sample = group.registry.get_sample_value
    assert (sample("shoal_coordinator_store_write_seconds_count") or 0) >= 4
    assert (sample("shoal_coordinator_store_records_total") or 0) >= 4
