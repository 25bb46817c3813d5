"""The tickets of a trainer whose worker has a token that is replaced while the trainer runs."""

import os
import queue
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import shoal
from shoal import errors
from shoal._rpc import CoordinatorClient, TicketSource
from shoal._security import AccessRole, Credentials, TokenSource
from shoal.v1 import coordinator_pb2, job_pb2
from shoal_worker.assignment import AssignedJob
from shoal_worker.messages import TicketReply, TicketWanted, decode, encode
from shoal_worker.tickets import DaemonTickets, reply_to
from support.clusters.secure_rig import SecureRig, secure_rig


@pytest.fixture(scope="module")
def rig() -> Iterator[SecureRig]:
    with secure_rig() as running:
        yield running


@pytest.fixture
def token_file(rig: SecureRig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file with the token of a worker."""
    file = tmp_path / "worker.token"
    put(file, rig.access.create("gpu-1", "worker", 60.0)[1])
    monkeypatch.setenv("SHOAL_TOKEN_FILE", str(file))
    return file


@pytest.fixture
def daemon(rig: SecureRig, token_file: Path) -> Iterator[CoordinatorClient]:
    presented = Credentials(token=TokenSource(rig.coordinator.address, AccessRole.WORKER))
    with closing(CoordinatorClient(rig.coordinator.address, credentials=presented)) as client:
        yield client


@pytest.fixture
def assigned(rig: SecureRig, daemon: CoordinatorClient) -> Iterator[AssignedJob]:
    """An assignment of the worker."""
    worker = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member="gpu-1", process="p")
    life = daemon.register(worker, retry_for_s=0).incarnation
    job = rig.client.submit(shoal.Job("m:f", name="trained"))
    beat = coordinator_pb2.HeartbeatRequest(member="gpu-1", incarnation=life)
    reply = daemon.call(daemon.members.Heartbeat, beat)
    assert reply.job == job.name
    yield AssignedJob(reply.job, reply.assignment, life)
    job.cancel()
    daemon.call(daemon.members.Leave, coordinator_pb2.LeaveRequest(member="gpu-1", incarnation=life))


def put(file: Path, token: str) -> None:
    """Replaces the content of a token file."""
    new = file.with_suffix(".new")
    new.write_text(token)
    new.chmod(0o600)
    os.replace(new, file)


def tickets_of(daemon: CoordinatorClient, assigned: AssignedJob) -> TicketSource:
    """Returns the source of a trainer. Its messages to the daemon and back are encoded, as on the pipes."""
    replies: queue.SimpleQueue[TicketReply] = queue.SimpleQueue()

    def emit(wanted: TicketWanted) -> None:
        message = decode(encode(wanted))
        assert isinstance(message, TicketWanted)
        replies.put(TicketReply.from_line(reply_to(message, daemon, "gpu-1", assigned).to_line()))

    return TicketSource(DaemonTickets(emit, replies, retry_for_s=1.0))


def test_a_trainer_outlives_the_token_of_its_worker(
    rig: SecureRig, token_file: Path, daemon: CoordinatorClient, assigned: AssignedJob
) -> None:
    tickets = tickets_of(daemon, assigned)
    first = rig.access.verifier.identify(tickets())
    assert first.expires_at <= time.time() + 60
    request = job_pb2.GetRequest(job="trained")
    with closing(CoordinatorClient(rig.coordinator.address, credentials=tickets.credentials)) as trainer:
        trainer.call(trainer.jobs.Get, request, retry_for_s=0)
        put(token_file, rig.access.create("gpu-1", "worker", 3_600.0)[1])
        rig.access.revoke(first.token)
        trainer.call(trainer.jobs.Get, request, retry_for_s=0)  # with a ticket of the new token
        second = rig.access.verifier.identify(tickets())
        assert (second.role, second.job, second.name) == (AccessRole.TRAINER, "trained", "gpu-1")
        assert second.expires_at > time.time() + 3_000
        rig.access.revoke(second.token)
        with pytest.raises(errors.Unauthenticated, match="was revoked"):
            trainer.call(trainer.jobs.Get, request, retry_for_s=0)
        put(token_file, rig.access.create("gpu-1", "worker", 60.0)[1])


def test_a_ticket_gets_no_other_ticket(rig: SecureRig, daemon: CoordinatorClient, assigned: AssignedJob) -> None:
    """A program that reads its ticket cannot prolong it."""
    tickets = tickets_of(daemon, assigned)
    with closing(CoordinatorClient(rig.coordinator.address, credentials=tickets.credentials)) as trainer:
        reply = reply_to(TicketWanted(has_one=True), trainer, "gpu-1", assigned)
    assert (reply.ticket, reply.code) == ("", errors.Forbidden.code)


def test_a_daemon_that_does_not_answer_does_not_hold_up_its_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal_worker.tickets.CALL_TIMEOUT_S", 0.0)
    with pytest.raises(errors.Unreachable, match=r"did not answer a request for a ticket within 0\.01 s"):
        DaemonTickets(lambda _: None, queue.SimpleQueue(), retry_for_s=0.01)(False)
