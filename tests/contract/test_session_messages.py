"""Messages of a session to a person who uses it in a way that cannot work. The test plays the coordinator."""

import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
import structlog

import shoal
from shoal import errors
from support.clusters.fake_coordinator import FakeCoordinator
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

GRADIENT = {"w": np.ones(3)}


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    with FakeCoordinator() as coordinator:
        yield coordinator


@pytest.fixture
def client(coordinator: FakeCoordinator) -> Iterator[shoal.Client]:
    with shoal.Client(coordinator.address, retry_for_s=0) as client:
        yield client


@pytest.fixture
def servers(coordinator: FakeCoordinator) -> Iterator[ShardServers]:
    with ShardServers({"w": np.zeros(3)}) as servers:
        coordinator.placement = servers.placement.to_proto()
        servers.admit("me", incarnation=1)
        yield servers


@pytest.fixture
def session(client: shoal.Client, servers: ShardServers) -> Iterator[shoal.Session]:
    with client.session("job", variables={"w": np.zeros(3)}, worker="me") as session:
        yield session


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [it.message for it in caplog.records if it.name == "shoal" and it.levelno == logging.WARNING]


def test_a_session_without_trainable_variables_warns(
    coordinator: FakeCoordinator, client: shoal.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with ShardServers({"w": np.array([1, 2, 3])}) as servers:
        coordinator.placement = servers.placement.to_proto()
        servers.admit("me", incarnation=1)
        with client.session("job", variables={"w": [1, 2, 3]}, worker="me"):
            pass
    (said,) = warnings(caplog)
    assert "session me (job job) has no trainable variable" in said
    assert "w is int64. A float dtype means trainable" in said


def test_a_session_with_a_trainable_variable_does_not_warn(
    session: shoal.Session, caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings(caplog) == []
    assert repr(session) == "Session('job', worker='me', rank=0, step=0)"


@pytest.mark.parametrize(
    "refusal",
    [
        errors.Overloaded("job job is full", workers=1),
        errors.InvalidJob("another shape", job="job"),
        errors.DuplicateMember("another live process has this id"),
    ],
)
def test_a_second_session_of_a_process_hears_of_the_first(
    coordinator: FakeCoordinator, client: shoal.Client, session: shoal.Session, refusal: errors.ShoalError
) -> None:
    coordinator.refusal = refusal
    said = "this process has session me of job job open: call its close.. first, or cancel the job with client.cancel"
    said = rf"{said}\('job'\).*{refusal.message}"
    with pytest.raises(type(refusal), match=said) as raised:
        client.session("job", variables={"w": np.zeros(4)})
    assert raised.value.details == refusal.details
    session.close()
    with pytest.raises(type(refusal), match=f"^{refusal.message}$"):
        client.session("job", variables={"w": np.zeros(4)})


def test_a_job_whose_first_session_is_refused_says_why_it_is_cancelled(
    coordinator: FakeCoordinator, client: shoal.Client
) -> None:
    coordinator.refusal = errors.InvalidJob("a group matches no variable")
    with pytest.raises(shoal.InvalidJob):
        client.session("job", variables={"w": np.zeros(3)}, worker="me")
    status = client.job("job").status()
    assert (status.state, status.reason) == (
        shoal.JobState.CANCELLED,
        "session me, which started it, could not enter: a group matches no variable",
    )


def test_a_session_says_what_differs_from_its_checkpoint(
    coordinator: FakeCoordinator, client: shoal.Client, servers: ShardServers, caplog: pytest.LogCaptureFixture
) -> None:
    note = "continues from job/2, step 7 (the optimizer's arguments differ)"
    coordinator.add(shoal.Job(name="job", restore="job/2", overlap=False), restore_note=note)
    with client.session("job", variables={"w": np.zeros(3)}, worker="me"):
        pass
    assert warnings(caplog) == [f"session me: job job {note}"]


def test_what_a_refused_push_can_do_names_the_call(session: shoal.Session) -> None:
    with pytest.raises(shoal.NonFiniteGradient, match=r"skip this step \(session\.skip\(\)\)"):
        session.push({"w": np.array([1.0, np.nan, 1.0])})
    assert session.skip().outcome == "skipped"


def test_nan_in_initial_values_is_said_of_them(servers: ShardServers) -> None:
    with (
        servers.client("", 0) as client,
        pytest.raises(errors.NonFiniteGradient, match=r"^the initial values of 'w' contain nan; .*Give finite values"),
    ):
        client.assign({"w": np.array([1.0, np.nan, 1.0])})


def test_a_closed_session_says_so(session: shoal.Session) -> None:
    session.close()
    for call in (session.pull, session.skip, lambda: session.push(GRADIENT)):
        with pytest.raises(shoal.Cancelled, match=r"session me of job job is closed; .*client\.session\(\)"):
            call()


def test_a_client_that_is_closed_names_its_open_session_and_heartbeats_end(
    coordinator: FakeCoordinator, servers: ShardServers, caplog: pytest.LogCaptureFixture
) -> None:
    def beating() -> bool:
        return any(thread.name == "heartbeat" for thread in threading.enumerate())

    with structlog.testing.capture_logs() as logged:
        client = shoal.Client(coordinator.address, retry_for_s=0)
        session = client.session("job", variables={"w": np.zeros(3)}, worker="me")
        client.close()
        (said,) = warnings(caplog)
        assert "session me (job job) is closed, and the session is still open" in said
        wait_until(lambda: not beating(), what="the end of the heartbeats")
    assert [line for line in [*caplog.messages, *(it["event"] for it in logged)] if "refuses heartbeats" in line] == []
    hint = r"the client of session me of job job is closed; .*Close the client after its sessions"
    for call in (session.pull, lambda: session.push(GRADIENT), session.settle, session.close):
        with pytest.raises(shoal.Cancelled, match=hint):
            call()


def test_the_address_of_a_server_is_no_coordinators(servers: ShardServers) -> None:
    with (
        shoal.Client(servers.addresses[0]) as client,
        pytest.raises(errors.BadRequest, match=r"no coordinator listens at 127.*perhaps a server.*coordinator's addr"),
    ):
        client.status()


def test_a_port_of_http_is_called_one() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        try:
            with (
                shoal.Client(f"127.0.0.1:{page.server_port}", retry_for_s=0) as client,
                pytest.raises(shoal.Unreachable, match="it looks like an HTTP port, such as the port of the page"),
            ):
                client.status()
        finally:
            page.shutdown()
            thread.join()
