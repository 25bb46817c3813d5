"""Limits of a submitter at the jobs of another one, and the calls that a revocation ends."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

import shoal
from shoal import errors
from shoal._checkpoint import Catalogue, LocalStorage, Manifest
from shoal._rpc import CoordinatorClient
from shoal._security import AccessRole, Credentials
from shoal.v1 import coordinator_pb2, job_pb2, token_pb2
from support.clusters.secure_rig import SecureRig, secure_rig
from support.waiting import wait_until

ACTION = {"sec-fetch-site": "same-origin", "x-shoal-page": "1"}


@pytest.fixture(scope="module")
def rig() -> Iterator[SecureRig]:
    with secure_rig(page_listen="127.0.0.1:0") as running:
        yield running


def presenting(token: str) -> Credentials:
    return Credentials(token=lambda: token)


@pytest.fixture
def ann(rig: SecureRig) -> Iterator[shoal.Client]:
    token = rig.token(AccessRole.SUBMITTER, worker="ann")
    with shoal.Client(rig.coordinator.address, credentials=presenting(token)) as client:
        yield client


@pytest.fixture
def bob(rig: SecureRig) -> Iterator[CoordinatorClient]:
    token = rig.token(AccessRole.SUBMITTER, worker="bob")
    client = CoordinatorClient(rig.coordinator.address, credentials=presenting(token))
    yield client
    client.close()


@pytest.fixture
def anns(ann: shoal.Client) -> Iterator[shoal.Session]:
    """A session of ann in her own job."""
    session = ann.session("anns", variables={"w": np.zeros(2, np.float32)}, optimizer=shoal.optim.SGD(1.0))
    yield session
    with suppress(errors.Cancelled):  # tests cancel the job
        session.close()


def calls(session: shoal.Session, incarnation: int) -> dict[str, tuple[str, Any]]:
    """The calls that change a job, or act for a participant of it, by name, with the part of the client."""
    who: dict[str, Any] = {"job": "anns", "worker": session.worker, "incarnation": incarnation}
    return {
        "Cancel": ("jobs", job_pb2.CancelRequest(job="anns")),
        "TakeCheckpoint": ("jobs", job_pb2.TakeCheckpointRequest(job="anns")),
        "Drop": ("jobs", job_pb2.DropRequest(job="anns")),
        "Describe": ("jobs", job_pb2.DescribeRequest(**who)),
        "Join": ("jobs", job_pb2.JoinRequest(**who)),
        "Lease": ("jobs", job_pb2.LeaseRequest(**who)),
        "ClaimEvaluation": ("jobs", job_pb2.ClaimEvaluationRequest(**who)),
        "ReportEvaluation": ("jobs", job_pb2.ReportEvaluationRequest(**who)),
        "Report": ("jobs", job_pb2.ReportRequest(**who)),
        "Finish": ("jobs", job_pb2.FinishRequest(**who)),
        "GetTicket": ("tokens", token_pb2.GetTicketRequest(**who)),
    }


def incarnation_of(rig: SecureRig, session: shoal.Session) -> int:
    return next(each.incarnation for each in rig.client.status().members if each.member == session.worker)


def test_a_submitter_changes_only_its_own_jobs(rig: SecureRig, anns: shoal.Session, bob: CoordinatorClient) -> None:
    for name, (stub, request) in calls(anns, incarnation_of(rig, anns)).items():
        with pytest.raises(errors.Forbidden, match=r"may not change anns, which is the job of 'ann'; ask an admin$"):
            bob.call(getattr(getattr(bob, stub), name), request, retry_for_s=0)
    page, token = rig.coordinator.page, rig.token(AccessRole.SUBMITTER, worker="bob")
    headers = ACTION | {"authorization": f"Bearer {token}"}
    for action in ("cancel", "checkpoint"):
        answered = httpx.post(f"{page}/api/jobs/anns/{action}", json={}, headers=headers, timeout=10)
        assert (answered.status_code, answered.json()["code"]) == (403, "FORBIDDEN")
    assert bob.call(bob.jobs.Get, job_pb2.GetRequest(job="anns")).status.spec.name == "anns"
    anns.pull()
    anns.push({"w": np.ones(2, np.float32)})
    rig.client.cancel("anns")  # an admin may
    with pytest.raises(errors.Cancelled, match="job anns was cancelled"):
        anns.close()


def test_a_submitter_does_not_replace_anothers_ended_job(ann: shoal.Client, rig: SecureRig) -> None:
    variables = {"w": np.zeros(2, np.float32)}
    with ann.session("kept", variables=variables, optimizer=shoal.optim.SGD(1.0)) as session:
        session.pull()
    wait_until(lambda: ann.job("kept").status().state.finished, what="the end of the job")
    bobs = presenting(rig.token(AccessRole.SUBMITTER, worker="bob"))
    with (
        shoal.Client(rig.coordinator.address, credentials=bobs) as client,
        pytest.raises(errors.Forbidden, match="'ann'"),
        client.session("kept", variables=variables, optimizer=shoal.optim.SGD(1.0)),
    ):
        pass
    assert ann.pull("kept")["w"].tolist() == [0.0, 0.0]


def test_tokens_of_one_name_are_one_submitter(anns: shoal.Session, rig: SecureRig) -> None:
    with shoal.Client(
        rig.coordinator.address, credentials=presenting(rig.access.create("ann", "submitter", 60.0)[1])
    ) as another:
        assert another.cancel("anns").state.finished


def test_an_assignment_has_the_name_and_the_access_role_of_the_submitter(rig: SecureRig, ann: shoal.Client) -> None:
    """So a worker can allow programs by both."""
    worker = CoordinatorClient(
        rig.coordinator.address, credentials=presenting(rig.token(AccessRole.WORKER, worker="eve"))
    )
    request = coordinator_pb2.RegisterRequest(
        role=coordinator_pb2.WORKER, member="eve", process="p", address="127.0.0.1:1"
    )
    try:
        life: dict[str, Any] = {"member": "eve"}
        life["incarnation"] = worker.register(request).incarnation
        for client, expected in ((ann, ("ann", "submitter")), (rig.client, ("local", "admin"))):
            job = client.submit(shoal.Job("m:f"))
            reply = worker.call(worker.members.Heartbeat, coordinator_pb2.HeartbeatRequest(**life))
            assert (reply.job, reply.submitter, reply.submitter_role) == (job.name, *expected)
            job.cancel()
        worker.call(worker.members.Leave, coordinator_pb2.LeaveRequest(**life))
    finally:
        worker.close()


def test_a_revocation_ends_running_streams(rig: SecureRig, anns: shoal.Session) -> None:
    made, token = rig.access.create("carl", "reader", 600.0)
    with shoal.Client(rig.coordinator.address, credentials=presenting(token)) as carl, ThreadPoolExecutor(1) as thread:
        begun = threading.Event()

        def watch() -> None:
            for _ in carl.job("anns").events():
                begun.set()

        watching = thread.submit(watch)
        assert begun.wait(10)
        admin = CoordinatorClient(rig.coordinator.address, credentials=presenting(rig.token(AccessRole.ADMIN)))
        admin.call(admin.tokens.RevokeToken, token_pb2.RevokeTokenRequest(token=made.id))
        admin.close()
        with pytest.raises(errors.Unauthenticated, match="revoked"):
            watching.result(5)


def test_a_stream_ends_when_its_token_expires(rig: SecureRig, anns: shoal.Session) -> None:
    token = rig.access.create("dora", "reader", 2.5)[1]
    with (
        shoal.Client(rig.coordinator.address, credentials=presenting(token)) as dora,
        ThreadPoolExecutor(1) as thread,
        pytest.raises(errors.Unauthenticated, match="expired"),
    ):
        thread.submit(lambda: list(dora.job("anns").events())).result(10)


def test_a_name_with_checkpoints_of_another_submitter_is_refused(tmp_path: Path) -> None:
    """Its job would continue their numbers, and remove them. An admin may, and their submitter."""
    catalogue = Catalogue(LocalStorage(tmp_path))
    catalogue.publish(Manifest("anns", 3, 0.0, 1, 1, {}, (), (), submitter="ann"))
    catalogue.publish(Manifest("old", 3, 0.0, 1, 1, {}, (), ()))
    with secure_rig(checkpoints=str(tmp_path)) as rig:
        for role, name, job, refused in (
            (AccessRole.SUBMITTER, "bob", "anns", True),
            (AccessRole.SUBMITTER, "bob", "old", False),  # nobody knows whose they are
            (AccessRole.SUBMITTER, "ann", "anns", False),
            (AccessRole.ADMIN, "bob", "anns", False),
        ):
            token = rig.token(role, worker=name)
            with shoal.Client(rig.coordinator.address, credentials=presenting(token)) as client:
                if refused:
                    with pytest.raises(errors.Forbidden, match="the checkpoint anns/3 is one of 'ann'; choose another"):
                        client.submit(shoal.Job("digits:Digits", name=job, restore="auto"))
                else:
                    submitted = client.submit(shoal.Job("digits:Digits", name=job))
                    submitted.cancel()
                    submitted.drop()
