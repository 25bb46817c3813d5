"""Calls that send headers but no message, and connections that send nothing: other calls still work."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

import shoal
from shoal import _rpc, errors
from shoal._limits import refusals
from shoal._rpc import receiving_pool
from shoal.v1 import coordinator_pb2, coordinator_pb2_grpc, parameter_server_pb2, parameter_server_pb2_grpc
from shoal_server.process import Server, ServerConfig
from support.clusters.coordinator_rig import HEARTBEAT_TIMEOUT_S, Rig
from support.faults.half_open import HalfOpenCalls, misbehaving
from support.run_lengths import size
from support.waiting import wait_until

CALLS, CONNECTIONS = 1_000, 200
# Longer than the heartbeat timeout of the rig; and as long as an operator would take to notice.
HELD_S = size(2 * HEARTBEAT_TIMEOUT_S, 60.0)
COORDINATOR = [f"/shoal.v1.Coordinator/{method}" for method in ("GetStatus", "Heartbeat", "Register", "Leave")]
JOBS = [f"/shoal.v1.Jobs/{method}" for method in ("List", "Watch", "Report", "Submit")]
SERVER = [f"/shoal.v1.ParameterServer/{method}" for method in ("Attach", "Pull", "Push", "Commit", "FenceWorkers")]
OTHERS = ["/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch", "/no.such/Method"]
OTHERS += ["/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"]


LIMIT_S = 1.0
# The part of the calls that must end within the limit. In the suite, other tests keep the cores busy while the server
# takes the first headers of thousands of calls. A call that waits for a half-open one ends only at its deadline.
PROMPT = size(0.9, 1.0)
LEAST_CALLS = 60


def check_prompt(calls: list[Callable[[], object]], for_s: float) -> None:
    """Repeats calls in turn, and checks that they end within the limit.

    Args:
        calls: each with a deadline of its own, at which it raises.
        for_s: how long to repeat them, or longer until there are enough calls.
    """
    pause, end = threading.Event(), time.monotonic() + for_s
    taken_s: list[float] = []
    while time.monotonic() < end or len(taken_s) < LEAST_CALLS:
        for call in calls:
            began = time.monotonic()
            call()
            taken_s.append(time.monotonic() - began)
        pause.wait(0.05)
    prompt = sum(each_s < LIMIT_S for each_s in taken_s)
    assert prompt >= PROMPT * len(taken_s), f"{prompt} of {len(taken_s)} calls within {LIMIT_S} s; {max(taken_s):.2f} s"


def test_a_coordinator_answers_beside_calls_that_never_come() -> None:
    rig = Rig()
    try:
        with grpc.insecure_channel(rig.process.address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            calls: list[Callable[[], object]] = [
                lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=20),
                lambda: rig.client.call(rig.client.members.GetStatus, coordinator_pb2.GetStatusRequest(), timeout_s=20),
            ]
            with misbehaving(rig.process.address, COORDINATOR + JOBS + OTHERS, calls=CALLS, connections=CONNECTIONS):
                check_prompt(calls, HELD_S)
        assert [member.alive for member in rig.member_status().values()] == [True, True]
    finally:
        rig.stop()


def test_a_session_trains_on_a_server_with_calls_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TRANSPORT", "grpc")
    rig = Rig()
    for name in ("s0", "s1"):  # the session's shards go to the server that is one
        rig.silent.add(name)
        life = coordinator_pb2.LeaveRequest(member=name, incarnation=rig.lives[name])
        rig.client.call(rig.client.members.Leave, life)
    server = Server(ServerConfig("server-0", rig.process.address), CollectorRegistry())
    try:
        with (
            grpc.insecure_channel(server.address) as channel,
            shoal.Client(rig.process.address) as client,
            client.session("job", variables={"w": np.zeros(3)}) as session,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            stub = parameter_server_pb2_grpc.ParameterServerStub(channel)

            def check_step() -> None:
                session.pull()
                assert session.push({"w": np.ones(3)}).outcome == "accepted"

            calls: list[Callable[[], object]] = [
                lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=20),
                lambda: stub.Attach(parameter_server_pb2.AttachRequest(), timeout=20),
                check_step,
            ]
            with (
                misbehaving(server.address, SERVER + OTHERS, calls=CALLS, connections=CONNECTIONS),
                misbehaving(rig.process.address, COORDINATOR + JOBS, calls=CALLS, connections=CONNECTIONS),
            ):
                began = session.step
                check_prompt(calls, HELD_S)
            assert session.step > began + 1
        assert rig.member_status()["server-0"].alive
    finally:
        server.stop()
        rig.stop()


class Members(coordinator_pb2_grpc.CoordinatorServicer):
    """A coordinator whose calls all wait for an event, except Heartbeat."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self.entered = 0

    @_rpc.servicer
    def GetStatus(self, _request: object, _context: object) -> coordinator_pb2.GetStatusReply:
        self.entered += 1
        self.release.wait(20)
        return coordinator_pb2.GetStatusReply()

    @_rpc.servicer
    def Heartbeat(self, _request: object, _context: object) -> coordinator_pb2.HeartbeatReply:
        return coordinator_pb2.HeartbeatReply(job="here")

    Register = Attend = Leave = Drain = DrainServer = GetStatus


ServerOf = Callable[[_rpc.CallLimits], tuple[_rpc.RpcServer, Members]]


@pytest.fixture
def server_of() -> Iterator[ServerOf]:
    started: list[tuple[_rpc.RpcServer, Members]] = []

    def start(limits: _rpc.CallLimits) -> tuple[_rpc.RpcServer, Members]:
        members = Members()
        add = coordinator_pb2_grpc.add_CoordinatorServicer_to_server
        server = _rpc.RpcServer(
            "127.0.0.1:0",
            [("shoal.v1.Coordinator", add, members)],
            threads=8,
            essential=["shoal.v1.Coordinator/Heartbeat"],
            limits=limits,
        )
        server.start()
        started.append((server, members))
        return server, members

    yield start
    for server, members in started:
        members.release.set()
        server.stop(0.1)


Refused = Callable[[str], int]


@pytest.fixture
def refused() -> Refused:
    """The refusals by a limit since the test began."""
    before = refusals("server")
    return lambda limit: refusals("server")[limit] - before[limit]


def test_this_grpcio_has_the_inside_that_the_receiving_pool_uses() -> None:
    assert receiving_pool.is_supported(), "see shoal._rpc.receiving_pool: its promises do not hold with this version"


def test_a_call_whose_message_is_late_ends_and_is_counted(server_of: ServerOf, refused: Refused) -> None:
    server, members = server_of(_rpc.CallLimits(message_s=0.05))
    half_open = HalfOpenCalls(server.address, [*COORDINATOR, *OTHERS], 20)
    try:
        wait_until(lambda: refused("MESSAGE_S") == 16, what="their end")
    finally:
        half_open.close()
    assert server.calls_without_message == 0
    members.release.set()
    with _rpc.channel(server.address) as channel:
        coordinator_pb2_grpc.CoordinatorStub(channel).GetStatus(coordinator_pb2.GetStatusRequest(), timeout=5)


def test_a_host_with_too_many_calls_is_refused_and_its_heartbeats_are_not(
    server_of: ServerOf, refused: Refused
) -> None:
    server, members = server_of(_rpc.CallLimits(host_calls=4))
    with _rpc.channel(server.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        held = [stub.GetStatus.future(coordinator_pb2.GetStatusRequest(), timeout=20) for _ in range(4)]
        wait_until(lambda: members.entered == 4, what="the calls that are held")
        with pytest.raises(errors.Overloaded, match=r"127\.0\.0\.1 has 4 calls at a time"):
            wait_until(lambda: _refused(stub, server.address), what="a refusal")
        assert stub.Heartbeat(coordinator_pb2.HeartbeatRequest(), timeout=1).job == "here"
        health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
        assert refused("HOST_CALLS") == 1
        members.release.set()
        for call in held:
            call.result()
        stub.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=5)  # the calls that ended count no more
    assert server.take_essential_delays()[1] == 0


def test_health_checks_take_no_places_of_heartbeats(server_of: ServerOf, refused: Refused) -> None:
    server, _ = server_of(_rpc.CallLimits(host_calls=20, host_open_calls=4))
    half_open = HalfOpenCalls(server.address, ["/grpc.health.v1.Health/Check"], 30)
    try:
        wait_until(lambda: refused("HOST_OPEN_CALLS") == 26, what="refusals")
        with _rpc.channel(server.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            assert stub.Heartbeat(coordinator_pb2.HeartbeatRequest(), timeout=5).job == "here"
        assert server.take_essential_delays()[1] == 0, "the coordinator would hold back expiry"
    finally:
        half_open.close()


def _refused(stub: coordinator_pb2_grpc.CoordinatorStub, address: str, page_token: str = "") -> bool:
    """Makes a call that may wait. Raises the error with which it is refused."""
    with _rpc.as_shoal_errors(address):
        try:
            stub.GetStatus(coordinator_pb2.GetStatusRequest(page_token=page_token), timeout=0.1)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
                raise
    return False


def test_calls_over_the_limit_in_all_are_refused(server_of: ServerOf, refused: Refused) -> None:
    server, members = server_of(_rpc.CallLimits(calls=1))
    with _rpc.channel(server.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        held = stub.GetStatus.future(coordinator_pb2.GetStatusRequest(), timeout=20)
        wait_until(lambda: members.entered == 1, what="the call that is held")
        with pytest.raises(errors.Overloaded, match="this server has 1 calls"):
            wait_until(lambda: _refused(stub, server.address), what="a refusal")
        members.release.set()
        held.result()
    assert refused("CALLS") == 1


def test_messages_that_wait_for_a_thread_are_limited(server_of: ServerOf, refused: Refused) -> None:
    server, members = server_of(_rpc.CallLimits(received_bytes=1_000))
    with _rpc.channel(server.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        held = [stub.GetStatus.future(coordinator_pb2.GetStatusRequest(), timeout=20) for _ in range(8)]
        wait_until(lambda: members.entered == 8, what="calls on all threads")
        waiting = stub.GetStatus.future(coordinator_pb2.GetStatusRequest(page_token="x" * 900), timeout=20)
        with pytest.raises(errors.Overloaded, match=r"messages of 903 bytes wait .* the limit RECEIVED_BYTES is 1000"):
            wait_until(lambda: _refused(stub, server.address, "x" * 900), what="a refusal")
        assert stub.Heartbeat(coordinator_pb2.HeartbeatRequest(), timeout=1).job == "here"
        members.release.set()
        for call in (*held, waiting):
            call.result()
        stub.GetStatus(coordinator_pb2.GetStatusRequest(page_token="x" * 900), timeout=5)  # the space is free again
    assert refused("RECEIVED_BYTES") == 1


def test_calls_without_a_message_end_when_memory_is_short(server_of: ServerOf, refused: Refused) -> None:
    server, members = server_of(_rpc.CallLimits(memory_bytes=1))
    members.release.set()
    half_open = HalfOpenCalls(server.address, ["/shoal.v1.Coordinator/GetStatus"], 20)
    try:
        wait_until(lambda: refused("MEMORY_PERCENT") == 20, what="their end, before the limit of 10 s")
    finally:
        half_open.close()
    with _rpc.channel(server.address) as channel:  # a call whose message comes at once is answered
        coordinator_pb2_grpc.CoordinatorStub(channel).GetStatus(coordinator_pb2.GetStatusRequest(), timeout=5)


def test_headers_that_are_too_large_are_refused(server_of: ServerOf) -> None:
    server, members = server_of(_rpc.CallLimits())
    members.release.set()
    with _rpc.channel(server.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        stub.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=5, metadata=(("x", "x" * 12_000),))
        with (
            pytest.raises(errors.MessageTooLarge, match="the limit HEADER_BYTES is 16384"),
            _rpc.as_shoal_errors(server.address),
        ):
            stub.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=5, metadata=(("x", "x" * 17_000),))


def test_a_server_stops_while_calls_wait_for_their_message(server_of: ServerOf) -> None:
    server, _ = server_of(_rpc.CallLimits())
    half_open = HalfOpenCalls(server.address, COORDINATOR, 50)
    try:
        wait_until(lambda: server.calls_without_message == 50, what="their headers")
        server.stop(0.1)
        assert server.calls_without_message == 0
    finally:
        half_open.close()


def test_a_call_that_grpcio_never_ends_does_not_hold_up_a_stop(
    server_of: ServerOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = server_of(_rpc.CallLimits())
    stop = type(grpc.server(ThreadPoolExecutor(1))).stop

    def stop_without_end(server: grpc.Server, grace: float | None) -> threading.Event:
        stop(server, grace)
        return threading.Event()

    with monkeypatch.context() as patch, structlog.testing.capture_logs() as logs:
        patch.setattr("grpc._server._Server.stop", stop_without_end)  # private: grpcio has no other
        patch.setattr("shoal._rpc.servers.CANCELLED_S", 0.01)
        server.stop(0.01)
    assert [entry["event"] for entry in logs] == ["stopped although a cancelled call has not ended"]
