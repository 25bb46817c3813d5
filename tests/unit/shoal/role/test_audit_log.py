"""The audit log: its records, what it leaves out, its files, and that it never holds up a call."""

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from shoal._limits import catalogue
from shoal._role import audit_log
from shoal._role.audit_log import AuditLog, audit_file
from shoal._rpc import CallOutcome
from shoal._security import AccessRole, Principal
from shoal.v1 import coordinator_pb2, job_pb2, parameter_server_pb2, token_pb2
from support.waiting import wait_until

ANN = Principal("ann", AccessRole.SUBMITTER, "t1")
NOW = 1_790_000_000.25


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def log(tmp_path: Path, registry: CollectorRegistry) -> AuditLog:
    return AuditLog("coordinator", tmp_path / "audit.jsonl", registry, lambda: NOW)


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def cancel(status: str = "OK", **more: Any) -> CallOutcome:
    return CallOutcome("shoal.v1.Jobs/Cancel", ANN, "10.0.0.5", status, job_pb2.CancelRequest(job="a"), **more)


def test_a_record_says_who_did_what_when_from_where_and_how_it_ended(log: AuditLog, tmp_path: Path) -> None:
    log.note(cancel())
    log.note(cancel("NOT_FOUND", reason="there is no job a"))
    log.close()
    first, second = read(tmp_path / "audit.jsonl")
    assert first == {
        "time": "2026-09-21T14:13:20.250+00:00",
        "call": "Jobs/Cancel",
        "outcome": "OK",
        "host": "10.0.0.5",
        "name": "ann",
        "role": "submitter",
        "token": "t1",
        "about": {"job": "a"},
    }
    assert (second["outcome"], second["reason"]) == ("NOT_FOUND", "there is no job a")
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o777 == 0o600


def test_reading_is_not_recorded_unless_it_is_refused(log: AuditLog, tmp_path: Path) -> None:
    for status in ("OK", "NOT_FOUND", "UNAUTHENTICATED", "PERMISSION_DENIED"):
        log.note(CallOutcome("shoal.v1.Jobs/Get", ANN, "h", status, job_pb2.GetRequest(job="a")))
    log.close()
    assert [each["outcome"] for each in read(tmp_path / "audit.jsonl")] == ["UNAUTHENTICATED", "PERMISSION_DENIED"]


def test_a_submission_is_recorded_by_its_name_alone(log: AuditLog, tmp_path: Path) -> None:
    request = job_pb2.SubmitRequest(token="repeat", spec=job_pb2.JobSpec(name="a", settings_json='{"password": "x"}'))
    log.note(CallOutcome("shoal.v1.Jobs/Submit", ANN, "h", "OK", request))
    created_token = token_pb2.CreateTokenRequest(name="b", role="reader")
    log.note(CallOutcome("shoal.v1.Tokens/CreateToken", ANN, "h", "OK", created_token))
    log.close()
    submitted, created = read(tmp_path / "audit.jsonl")
    assert submitted["about"] == {"job": "a"}
    assert created["about"] == {"name": "b", "role": "reader"}
    assert "password" not in (tmp_path / "audit.jsonl").read_text()


def test_a_flood_of_refused_calls_is_summed_up(
    log: AuditLog, tmp_path: Path, registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    most = catalogue.AUDIT_REFUSALS.default
    for _ in range(most + 5):
        log.note(cancel("UNAUTHENTICATED"))
    log.note(cancel())
    log.close()
    records = read(tmp_path / "audit.jsonl")
    assert len(records) == most + 1
    assert records[-1]["left_out"] == 5
    labels = {"call": "Jobs/Cancel", "outcome": "UNAUTHENTICATED"}
    assert registry.get_sample_value("shoal_coordinator_audit_records_total", labels) == most + 5


def test_a_flood_of_unknown_callers_hides_no_known_one(log: AuditLog, tmp_path: Path) -> None:
    """The holder of a stolen token could otherwise hide its refused calls among calls without a token."""
    for number in range(catalogue.AUDIT_REFUSALS.default + 5):
        log.note(CallOutcome("shoal.v1.Jobs/Get", None, f"10.0.0.{number}", "UNAUTHENTICATED"))
    log.note(cancel("PERMISSION_DENIED"))
    log.close()
    last = read(tmp_path / "audit.jsonl")[-1]
    assert (last["outcome"], last["name"], last["left_out"]) == ("PERMISSION_DENIED", "ann", 5)


def test_a_flood_of_permitted_calls_hides_no_others(log: AuditLog, tmp_path: Path) -> None:
    most = catalogue.AUDIT_CALLS.default
    leave = coordinator_pb2.LeaveRequest(member="nobody")
    for _ in range(most + 5):
        log.note(CallOutcome("shoal.v1.Coordinator/Leave", ANN, "h", "OK", leave))
    log.note(cancel())
    bob = Principal("bob", AccessRole.WORKER, "t2")
    log.note(CallOutcome("shoal.v1.Coordinator/Leave", bob, "h", "OK", leave))
    log.close()
    records = read(tmp_path / "audit.jsonl")
    assert [(each["call"], each["name"]) for each in records] == [
        *[("Coordinator/Leave", "ann")] * most,
        ("Jobs/Cancel", "ann"),
        ("Coordinator/Leave", "bob"),
    ]
    assert [each.get("left_out", 0) for each in records[most:]] == [5, 0]


def test_the_limit_of_records_is_for_each_second(tmp_path: Path, registry: CollectorRegistry) -> None:
    seconds = iter(range(10**9, 2 * 10**9))
    log = AuditLog("coordinator", tmp_path / "audit.jsonl", registry, lambda: next(seconds))
    for _ in range(catalogue.AUDIT_CALLS.default + 5):
        log.note(cancel())
    log.close()
    assert len(read(tmp_path / "audit.jsonl")) == catalogue.AUDIT_CALLS.default + 5


def test_files_are_rotated_and_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_log, "FILE_BYTES", 300)
    log = AuditLog("coordinator", tmp_path / "audit.jsonl", CollectorRegistry())
    for _ in range(50):
        log.note(cancel())
    log.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 1 + audit_log.FILES
    assert all(file.stat().st_size <= 300 for file in files)


def test_a_file_that_cannot_be_written_loses_records_and_stops_nothing(
    tmp_path: Path, registry: CollectorRegistry
) -> None:
    log = AuditLog("coordinator", tmp_path / "missing" / "audit.jsonl", registry)
    log.note(cancel())
    log.note(cancel())
    log.close()
    assert registry.get_sample_value("shoal_coordinator_audit_records_lost_total") == 2


def test_without_a_file_calls_are_counted(registry: CollectorRegistry) -> None:
    log = AuditLog("coordinator", None, registry)
    log.note(cancel())
    log.close()
    labels = {"call": "Jobs/Cancel", "outcome": "OK"}
    assert registry.get_sample_value("shoal_coordinator_audit_records_total", labels) == 1


def test_a_call_that_a_waiting_process_repeats_is_recorded_once_an_hour(
    tmp_path: Path, registry: CollectorRegistry
) -> None:
    """A worker repeats Join while it waits. Its records would push others out of the files."""
    now = [NOW]
    log = AuditLog("coordinator", tmp_path / "audit.jsonl", registry, lambda: now[0])

    def join(job: str, status: str = "OK") -> None:
        request = job_pb2.JoinRequest(job=job, worker="w")
        log.note(CallOutcome("shoal.v1.Jobs/Join", ANN, "h", status, request))
        now[0] += 1.0

    for job in ("a", "b", "a", "b"):
        join(job)
    join("a", "NOT_FOUND")
    for _ in range(2):
        join("a", "PERMISSION_DENIED")
    now[0] += audit_log.AGAIN_S
    join("a")
    log.close()
    records = read(tmp_path / "audit.jsonl")
    assert [(each["about"]["job"], each["outcome"]) for each in records] == [
        ("a", "OK"),
        ("b", "OK"),
        ("a", "NOT_FOUND"),
        ("a", "PERMISSION_DENIED"),
        ("a", "PERMISSION_DENIED"),
        ("a", "OK"),
    ]
    assert not any("left_out" in each for each in records)
    labels = {"call": "Jobs/Join", "outcome": "OK"}
    assert registry.get_sample_value("shoal_coordinator_audit_records_total", labels) == 5


def test_a_server_records_whom_it_fenced_and_the_job_of_a_ticket(tmp_path: Path, registry: CollectorRegistry) -> None:
    log = AuditLog("server", tmp_path / "audit.jsonl", registry)
    coordinator = Principal("coordinator", AccessRole.COORDINATOR)
    request = parameter_server_pb2.FenceWorkersRequest(job="a")
    for number in range(20):
        request.workers.add(worker=f"w{number}", incarnation=1)
    log.note(CallOutcome("shoal.v1.ParameterServer/FenceWorkers", coordinator, "h", "OK", request))
    trainer = Principal("w1", AccessRole.TRAINER, "t1", "a", 1)
    log.note(CallOutcome("shoal.v1.ParameterServer/Assign", trainer, "h", "OK"))
    log.close()
    fenced, assigned = read(tmp_path / "audit.jsonl")
    assert fenced["about"] == {"job": "a", "workers": "w0, w1, w2, w3, w4, w5, w6, w7"}
    assert (assigned["name"], assigned["ticket_job"]) == ("w1", "a")
    labels = {"call": "ParameterServer/FenceWorkers", "outcome": "OK"}
    assert registry.get_sample_value("shoal_server_audit_records_total", labels) == 1


def test_one_process_alone_writes_a_file(tmp_path: Path, registry: CollectorRegistry) -> None:
    """Two would rotate each other's records away. The other one goes on when the first has stopped."""
    first, second = (AuditLog(role, tmp_path / "audit.jsonl", registry) for role in ("coordinator", "server"))
    first.note(cancel())
    wait_until(lambda: (tmp_path / "audit.jsonl").exists() and read(tmp_path / "audit.jsonl"), what="the record")
    second.note(cancel())
    wait_until(lambda: registry.get_sample_value("shoal_server_audit_records_lost_total"), what="the loss")
    first.close()
    second.note(cancel("NOT_FOUND"))
    second.close()
    assert [each["outcome"] for each in read(tmp_path / "audit.jsonl")] == ["OK", "NOT_FOUND"]


def test_roles_that_share_a_folder_have_files_of_their_own(tmp_path: Path) -> None:
    assert audit_file(str(tmp_path), "server-0") == tmp_path / "server-0.audit.jsonl"
    assert audit_file(str(tmp_path / "a.jsonl"), "server-0") == tmp_path / "a.jsonl"
    assert audit_file("none", "coordinator", tmp_path) is None
    assert audit_file("", "coordinator", tmp_path / "default") == tmp_path / "default"
