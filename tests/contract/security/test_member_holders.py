"""Members that belong to the caller who registered them: calls for a member, and tickets for it."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from shoal import _rpc, errors, optim
from shoal._security import AccessRole, Credentials
from shoal.v1 import coordinator_pb2, job_pb2, token_pb2
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.process import CoordinatorConfig, CoordinatorProcess, start_coordinator
from shoal_server.process import Server, ServerConfig
from support.clusters.secure_rig import SecureRig, calls_on_jobs, request_of, secure_rig
from support.waiting import wait_until


@pytest.fixture(scope="module")
def rig() -> Iterator[SecureRig]:
    with secure_rig() as running:
        yield running


def calling(rig: SecureRig, token: str) -> _rpc.CoordinatorClient:
    """Returns a client of the coordinator that presents a token."""
    return _rpc.CoordinatorClient(rig.coordinator.address, credentials=Credentials(token=lambda: token))


def worker_named(member: str, process: str) -> coordinator_pb2.RegisterRequest:
    return coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member=member, process=process)


def test_nobody_speaks_for_a_member_of_another_caller(rig: SecureRig) -> None:
    """Bob knows ann's member, because everybody may read the status."""
    worker = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member="anns-worker", process="p")
    ann, bob = (calling(rig, rig.token(AccessRole.WORKER, worker=name)) for name in ("ann", "bob"))
    submitter = calling(rig, rig.token(AccessRole.SUBMITTER, worker="ann"))
    try:
        life = ann.register(worker, retry_for_s=0).incarnation
        own: dict[str, Any] = {"member": "anns-worker", "incarnation": life}
        of_server: dict[str, Any] = {"member": "server-0", "incarnation": 1}
        for caller, fields in ((bob, own), (submitter, own), (bob, of_server), (ann, of_server)):
            for call, request in (
                (caller.members.Heartbeat, coordinator_pb2.HeartbeatRequest(**fields)),
                (caller.members.Leave, coordinator_pb2.LeaveRequest(**fields)),
            ):
                with pytest.raises(errors.Forbidden, match="may not speak for"):
                    caller.call(call, request, retry_for_s=0)
        with pytest.raises(errors.DuplicateMember):  # even with the process id of ann's worker
            bob.register(worker, retry_for_s=0)
        assert ann.register(worker, retry_for_s=0).incarnation == life
        with pytest.raises(errors.Forbidden, match="may not speak for"):
            bob.call(bob.jobs.Report, job_pb2.ReportRequest(job="job", worker="anns-worker", incarnation=life))
        ann.call(ann.members.Heartbeat, coordinator_pb2.HeartbeatRequest(**own), retry_for_s=0)
        ann.call(ann.members.Leave, coordinator_pb2.LeaveRequest(**own), retry_for_s=0)
    finally:
        for client in (ann, bob, submitter):
            client.close()


def test_a_worker_gets_tickets_only_for_jobs_that_it_takes_part_in(rig: SecureRig) -> None:
    worker = calling(rig, rig.token(AccessRole.WORKER, worker="eve"))
    try:
        asked = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member="eve", process="p")
        life = worker.register(asked, retry_for_s=0).incarnation
        for fields in ({"job": "job"}, {"job": "job", "worker": "eve", "incarnation": life}):
            with pytest.raises(errors.Forbidden, match="only for workers that take part in job"):
                worker.call(worker.tokens.GetTicket, token_pb2.GetTicketRequest(**fields), retry_for_s=0)
        left = coordinator_pb2.LeaveRequest(member="eve", incarnation=life)
        worker.call(worker.members.Leave, left, retry_for_s=0)
    finally:
        worker.close()


def test_a_worker_reads_no_job_with_its_own_token(rig: SecureRig) -> None:
    """Its trainers read their jobs, with their tickets."""
    worker = calling(rig, rig.token(AccessRole.WORKER, worker="eve"))
    trainer = calling(rig, rig.token(AccessRole.TRAINER, job="job", worker="eve", incarnation=1))
    asked = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member="eve", process="p")
    try:
        life = worker.register(asked, retry_for_s=0).incarnation
        for call in ("Get", "GetPlacement"):
            request = request_of(call, job="job")
            with pytest.raises(errors.Forbidden, match="worker 'eve' may not"):
                worker.call(getattr(worker.jobs, call), request, retry_for_s=0)
            assert trainer.call(getattr(trainer.jobs, call), request, retry_for_s=0)
        worker.call(worker.members.Leave, coordinator_pb2.LeaveRequest(member="eve", incarnation=life), retry_for_s=0)
    finally:
        trainer.close()
        worker.close()


def test_processes_of_one_token_do_not_speak_for_each_other(rig: SecureRig) -> None:
    """As in Compose, where all workers have one certificate. Only the secret of the registration tells them apart."""
    gpu, eve = (calling(rig, rig.token(AccessRole.WORKER, worker="shared")) for _ in range(2))
    server = calling(rig, rig.token(AccessRole.SERVER, worker="local"))
    own: dict[str, Any] = {"job": "job", "worker": "gpu"}
    try:
        first = gpu.register(worker_named("gpu", "p")).incarnation
        own["incarnation"] = first
        eves = eve.register(worker_named("eve", "q")).incarnation
        member: dict[str, Any] = {"member": "gpu", "incarnation": first}
        of_gpu = [
            ("members", "Heartbeat", coordinator_pb2.HeartbeatRequest(**member)),
            ("members", "Leave", coordinator_pb2.LeaveRequest(**member)),
            ("tokens", "GetTicket", token_pb2.GetTicketRequest(**own)),
            *(("jobs", call, request_of(call, **own)) for call in ("Report", "Lease", "Join", "Describe", "Finish")),
        ]
        for claimed, text in ({}, "has shown none"), ({"gpu": eve.member_secrets["eve"]}, "that of 'eve'"):
            eve.member_secrets.pop("gpu", None)
            eve.member_secrets.update(claimed)
            for service, call, request in of_gpu:
                with pytest.raises(errors.Forbidden, match=f"may not speak for worker 'gpu' .*{text}"):
                    eve.call(getattr(getattr(eve, service), call), request, retry_for_s=0)
        of_server = coordinator_pb2.LeaveRequest(member="server-0", incarnation=1)
        with pytest.raises(errors.Forbidden, match="may not speak for server 'server-0' without the secret"):
            server.call(server.members.Leave, of_server, retry_for_s=0)
        gpu.call(gpu.members.Heartbeat, coordinator_pb2.HeartbeatRequest(**member), retry_for_s=0)
        gpu.call(gpu.members.Leave, coordinator_pb2.LeaveRequest(**member), retry_for_s=0)
        eve.call(eve.members.Leave, coordinator_pb2.LeaveRequest(member="eve", incarnation=eves), retry_for_s=0)
    finally:
        for client in (gpu, eve, server):
            client.close()


def test_a_secret_ends_with_its_incarnation(rig: SecureRig) -> None:
    """An earlier holder of the member id registers again. It cannot speak for the one that has the id now."""
    earlier, later = (calling(rig, rig.token(AccessRole.WORKER, worker="shared")) for _ in range(2))
    try:
        first = earlier.register(worker_named("gpu", "p")).incarnation
        earlier.call(earlier.members.Leave, coordinator_pb2.LeaveRequest(member="gpu", incarnation=first))
        life = later.register(worker_named("gpu", "q")).incarnation
        beat = coordinator_pb2.HeartbeatRequest(member="gpu", incarnation=life)
        own = coordinator_pb2.HeartbeatRequest(member="gpu", incarnation=first)
        with pytest.raises(errors.Fenced) as fenced:  # it was the member, and has to register again
            earlier.call(earlier.members.Heartbeat, own, retry_for_s=0)
        assert fenced.value.status == "ABORTED"
        genuine = earlier.member_secrets["gpu"]
        for secret in (genuine, genuine.replace(f".{first}.", f".{life}."), "gpu", "gpu.x.y", ".."):
            earlier.member_secrets["gpu"] = secret
            with pytest.raises(errors.SecretRefused, match="register again") as refused:
                earlier.call(earlier.members.Heartbeat, beat, retry_for_s=0)
            assert refused.value.status == "PERMISSION_DENIED"
        later.call(later.members.Leave, coordinator_pb2.LeaveRequest(member="gpu", incarnation=life))
    finally:
        earlier.close()
        later.close()


def test_a_member_outlives_a_restart_and_the_loss_of_the_coordinators_store(tmp_path: Path) -> None:
    """With the store, its secret stays genuine. With a new store, and so with a new key, it registers again by itself.

    It then has new secrets: the coordinator answers heartbeats, which it would not do without them.
    """
    registry, listen = CollectorRegistry, "127.0.0.1:0"
    with ExitStack() as stack:
        server: Server | None = None
        lives = []
        for store in ("a.db", "a.db", "b.db"):
            config = CoordinatorConfig(listen=listen, secure=True, store=str(tmp_path / store))
            coordinator = start_coordinator(config, registry())
            try:
                listen = coordinator.address
                if server is None:
                    server = Server(ServerConfig("server-0", listen), registry())
                    stack.callback(server.stop)
                lives.append(_incarnation_that_sends_heartbeats(coordinator, "server-0"))
            finally:
                coordinator.stop()
    assert lives[0] == lives[1]


def _incarnation_that_sends_heartbeats(process: CoordinatorProcess, member: str) -> int:
    """Waits until the coordinator has answered heartbeats of a member, and returns its incarnation."""

    def found() -> tuple[int, float]:
        with process.coordinator.reading() as (cluster, _):
            known = cluster.members.find(member)
            return (known.incarnation, known.last_seen) if known else (0, 0.0)

    wait_until(lambda: found()[0], what="the registration")
    first = found()
    wait_until(lambda: found()[0] == first[0] and found()[1] > first[1], what="the next heartbeat")
    return first[0]


def test_a_member_of_an_earlier_version_needs_no_secret(rig: SecureRig) -> None:
    """It has none, and continues after an upgrade of the coordinator."""
    worker = calling(rig, rig.token(AccessRole.WORKER, worker="shared"))
    try:
        life = worker.register(worker_named("old", "p")).incarnation
        with rig.coordinator.coordinator.reading() as (cluster, _):
            member = cluster.members.find("old")
            assert member
            assert member.registration.has_secret
            member.registration = replace(member.registration, has_secret=False)
        worker.member_secrets.clear()
        for call in ("Heartbeat", "Leave"):
            request = getattr(coordinator_pb2, f"{call}Request")(member="old", incarnation=life)
            worker.call(getattr(worker.members, call), request, retry_for_s=0)
    finally:
        worker.close()


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> list[Coordinator]:
    """Returns a list that gets an item for each reading of the state."""
    made, reading = [], Coordinator.reading

    def counted(coordinator: Coordinator) -> Any:
        made.append(coordinator)
        return reading(coordinator)

    monkeypatch.setattr(Coordinator, "reading", counted)
    return made


def test_a_call_reads_the_state_once(rig: SecureRig, readings: list[Coordinator]) -> None:
    """Each reading waits for the coordinator's lock, and for the decisions before it."""
    user = calling(rig, rig.token(AccessRole.SUBMITTER, worker="local"))
    worker = calling(rig, rig.token(AccessRole.WORKER, worker="eve"))
    own: dict[str, Any] = {"job": "job", "worker": rig.session.worker, "incarnation": rig.incarnation}
    try:
        user.member_secrets[rig.session.worker] = rig.access.members.of(rig.session.worker, rig.incarnation)
        asked = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member="eve", process="p")
        life: dict[str, Any] = {"member": "eve", "incarnation": 1}
        life["incarnation"] = worker.register(asked, retry_for_s=0).incarnation
        for client, call, request, count in (
            (user, user.tokens.GetTicket, token_pb2.GetTicketRequest(**own), 1),
            (user, user.jobs.Report, job_pb2.ReportRequest(**own), 0),
            (user, user.jobs.Join, job_pb2.JoinRequest(**own, wait_s=1.0), 0),
            (worker, worker.members.Heartbeat, coordinator_pb2.HeartbeatRequest(**life), 0),
            (worker, worker.members.Leave, coordinator_pb2.LeaveRequest(**life), 0),
        ):
            readings.clear()
            client.call(call, request, retry_for_s=0)
            assert len(readings) == count, type(request).__name__
    finally:
        user.close()
        worker.close()


def test_a_call_on_a_job_is_checked_when_it_is_handled(rig: SecureRig, readings: list[Coordinator]) -> None:
    """Between a check and a later event, somebody else could submit a job of the same name."""
    own: dict[str, Any] = {"job": "job", "worker": rig.session.worker, "incarnation": rig.incarnation}
    calls = [call for call in calls_on_jobs(role=AccessRole.SUBMITTER, without=AccessRole.READER) if call != "Submit"]
    assert {"Cancel", "Report", "Join"} < {*calls}
    bob = calling(rig, rig.token(AccessRole.SUBMITTER, worker="bob"))
    readings.clear()
    try:
        for call in calls:
            request = request_of(call, **own, wait_s=1.0)
            if call == "SetLearningRate":
                request.learning_rate.CopyFrom(optim.ConstantLR(0.1).to_proto())
            with pytest.raises(errors.Forbidden, match="which is the job of 'local'"):
                bob.call(getattr(bob.jobs, call), request, retry_for_s=0)
    finally:
        bob.close()
    assert not readings
