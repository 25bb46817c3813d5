"""Features of every role's gRPC server: the port, the health service, reflection, and errors that keep their codes."""

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from grpc import Channel, RpcError, Server, ServicerContext, StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from shoal import _rpc, errors
from shoal.v1 import coordinator_pb2, coordinator_pb2_grpc, header_pb2
from support.faults.proxy import Network
from support.waiting import wait_until


class Coordinator(coordinator_pb2_grpc.CoordinatorServicer):
    failure: Exception | None = None
    before: Callable[[], object] = staticmethod(lambda: None)

    @_rpc.servicer
    def GetStatus(
        self, request: coordinator_pb2.GetStatusRequest, context: ServicerContext
    ) -> coordinator_pb2.GetStatusReply:
        self.before()
        if self.failure:
            raise self.failure
        return coordinator_pb2.GetStatusReply(cluster="c")

    Register = Heartbeat = Attend = Leave = Drain = DrainServer = GetStatus


class CoordinatorServer(_rpc.RpcServer):
    implementation: Coordinator


@pytest.fixture
def server() -> Iterator[CoordinatorServer]:
    implementation = Coordinator()
    add = coordinator_pb2_grpc.add_CoordinatorServicer_to_server
    server = CoordinatorServer("127.0.0.1:0", [("shoal.v1.Coordinator", add, implementation)], threads=4)
    server.implementation = implementation
    server.start()
    yield server
    server.stop(0.1)


@pytest.fixture
def channel(server: CoordinatorServer) -> Iterator[Channel]:
    with _rpc.channel(server.address) as channel:
        yield channel


def test_every_error_comes_back_as_itself(server: CoordinatorServer, channel: Channel) -> None:
    stub = coordinator_pb2_grpc.CoordinatorStub(channel)
    for kind in errors.ShoalError.catalogue.values():
        server.implementation.failure = kind("what it was", member="m")
        with pytest.raises(kind, match="what it was") as caught, _rpc.as_shoal_errors(server.address):
            stub.GetStatus(coordinator_pb2.GetStatusRequest())
        assert type(caught.value) is kind
        assert caught.value.details == {"member": "m"}


def test_a_connection_over_a_slow_network_takes_one_attempt(server: CoordinatorServer) -> None:
    """Its handshake takes several round trips, and gRPC begins again with each attempt."""
    with Network() as network:
        link = network.proxy("client to coordinator", server.address)
        link.delay(0.1)
        with _rpc.channel(link.address) as channel:
            stub = coordinator_pb2_grpc.CoordinatorStub(channel)
            assert stub.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=10).cluster == "c"
        assert link.counts.connections == 1


def test_an_error_of_a_later_version_is_internal_and_keeps_its_text() -> None:
    detail = header_pb2.ErrorDetail(code="NOT_INVENTED_YET", message="what it was", details={"member": "m"})
    error = _rpc.error_of(detail)
    assert type(error) is errors.InternalError
    assert (error.message, error.details) == ("what it was", {"member": "m"})


def test_an_error_travels_in_a_bounded_message() -> None:
    error = errors.ProgramError("begin " + "x" * 10**6 + " end", value="y" * 10**6)
    detail = _rpc.detail_of(error)
    assert detail.ByteSize() < 5_000
    assert detail.message.startswith("begin")
    assert detail.message.endswith("end")


def test_a_defect_is_an_internal_error_that_names_it_and_the_server_lives_on(
    server: CoordinatorServer, channel: Channel
) -> None:
    stub = coordinator_pb2_grpc.CoordinatorStub(channel)
    server.implementation.failure = ZeroDivisionError("oops")
    with (
        pytest.raises(errors.InternalError, match="GetStatus failed: ZeroDivisionError: oops"),
        _rpc.as_shoal_errors("x"),
    ):
        stub.GetStatus(coordinator_pb2.GetStatusRequest())
    server.implementation.failure = AssertionError()  # without a text
    with pytest.raises(errors.InternalError, match="GetStatus failed: AssertionError"), _rpc.as_shoal_errors("x"):
        stub.GetStatus(coordinator_pb2.GetStatusRequest())
    server.implementation.failure = None
    assert stub.GetStatus(coordinator_pb2.GetStatusRequest()).cluster == "c"


def test_methods_may_have_their_messages_as_bytes() -> None:
    """The named methods have bytes in both directions. The messages of the others are decoded."""

    class Members(coordinator_pb2_grpc.CoordinatorServicer):
        def Register(self, request: Any, context: ServicerContext) -> coordinator_pb2.RegisterReply:
            seen.append(request)
            return coordinator_pb2.RegisterReply(incarnation=3)

        def Leave(self, request: coordinator_pb2.LeaveRequest, context: ServicerContext) -> Any:
            seen.append(request)
            return coordinator_pb2.LeaveReply().SerializeToString()

        def Drain(self, *_: object) -> coordinator_pb2.DrainReply:
            raise NotImplementedError

        def DrainServer(self, *_: object) -> coordinator_pb2.DrainServerReply:
            raise NotImplementedError

        def GetStatus(self, *_: object) -> coordinator_pb2.GetStatusReply:
            raise NotImplementedError

        def Heartbeat(self, *_: object) -> coordinator_pb2.HeartbeatReply:
            raise NotImplementedError

        def Attend(self, *_: object) -> coordinator_pb2.AttendReply:
            raise NotImplementedError

    def add(implementation: "Members", server: Server) -> None:
        raw: Any = _rpc.RawMessages(server, requests={"Register"}, replies={"Leave"})
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(implementation, raw)

    seen: list[bytes | coordinator_pb2.LeaveRequest] = []
    server = _rpc.RpcServer("127.0.0.1:0", [("shoal.v1.Coordinator", add, Members())], threads=1)
    server.start()
    with _rpc.channel(server.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)
        request = coordinator_pb2.RegisterRequest(member="m")
        assert stub.Register(request).incarnation == 3
        assert stub.Leave(coordinator_pb2.LeaveRequest(member="n")) == coordinator_pb2.LeaveReply()
    server.stop(0.1)
    assert seen == [request.SerializeToString(), coordinator_pb2.LeaveRequest(member="n")]


def test_health_says_ready_only_when_it_is(server: CoordinatorServer, channel: Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    for ready, status in ((False, "NOT_SERVING"), (True, "SERVING")):
        server.set_ready(ready)
        for service in ("", "shoal.v1.Coordinator"):
            reply = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status) == status
    refusals: list[tuple[Callable[[], object], StatusCode]] = [
        (lambda: health.Check(health_pb2.HealthCheckRequest(service="x" * 100)), StatusCode.NOT_FOUND),
        (lambda: next(health.Watch(health_pb2.HealthCheckRequest())), StatusCode.UNIMPLEMENTED),
    ]
    for call, code in refusals:
        with pytest.raises(RpcError) as refused:
            call()
        assert refused.value.code() is code


def test_reflection_lists_the_services(server: CoordinatorServer, channel: Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    (reply,) = stub.ServerReflectionInfo(iter([request]))
    names = {service.name for service in reply.list_services_response.service}
    assert {"shoal.v1.Coordinator", "grpc.health.v1.Health"} <= names


def test_a_port_in_use_is_named_with_its_option_and_grpc_writes_nothing(
    server: CoordinatorServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(errors.PortInUse) as refused:
        _rpc.RpcServer(server.address, [], threads=1)
    assert refused.value.message == (
        f"cannot listen on {server.address}: another process uses the port; choose another port with --listen, or 0 "
        "for any free one"
    )
    assert capfd.readouterr().err == ""


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(errors.PortInUse, match="does not have this address; choose one of its own with --listen"):
        _rpc.RpcServer("192.0.2.1:0", [], threads=1)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_reserved_port_is_free_for_the_process_that_names_it(host: str) -> None:
    with _rpc.reserve("127.0.0.1", 0) as holder:
        _rpc.check_free(f"{host}:{holder.getsockname()[1]}")
        holder.listen()
        with pytest.raises(errors.PortInUse):
            _rpc.check_free(f"{host}:{holder.getsockname()[1]}")


@pytest.mark.parametrize(("host", "bound"), [("127.0.0.1", "127.0.0.1"), ("[::1]", "::1"), ("0.0.0.0", "0.0.0.0")])
def test_a_port_to_listen_on(host: str, bound: str) -> None:
    try:
        listener = _rpc.listen(host, 0)
    except errors.PortInUse:
        pytest.skip(f"this machine has no {host}")
    with listener:
        assert listener.getsockname()[0] == bound
        taken = listener.getsockname()[1]
        assert taken
        with pytest.raises(errors.PortInUse, match=f":{taken}: .*choose another port"):
            _rpc.listen(host, taken)


def test_the_host_that_others_call() -> None:
    assert _rpc.public_host("127.0.0.1", "") == "127.0.0.1"
    assert _rpc.public_host("127.0.0.1", "me.example") == "me.example"
    assert _rpc.public_host("0.0.0.0", "") == socket.gethostname()
    assert _rpc.public_host("[::]", "") == socket.gethostname()


@pytest.mark.parametrize("bind", ["nonsense", "127.0.0.1", "127.0.0.1:http", ":7070", "127.0.0.1:70700"])
def test_invalid_address_is_refused(bind: str) -> None:
    with pytest.raises(errors.BadRequest, match="give host:port"):
        _rpc.RpcServer(bind, [], threads=1)


def test_a_call_on_a_channel_that_was_closed_is_cancelled(server: CoordinatorServer) -> None:
    channel = _rpc.channel(server.address)
    stub = coordinator_pb2_grpc.CoordinatorStub(channel)
    channel.close()
    with pytest.raises(errors.Cancelled, match="closed on this side"), _rpc.as_shoal_errors(server.address):
        stub.GetStatus(coordinator_pb2.GetStatusRequest())


def test_a_stopped_server_frees_its_port(server: CoordinatorServer) -> None:
    server.stop(0.1)
    host, port = server.address.split(":")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))


def test_call_to_a_closed_port_is_unreachable_and_names_the_address() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
    with (
        _rpc.channel(address) as channel,
        pytest.raises(errors.Unreachable, match=address),
        _rpc.as_shoal_errors(address),
    ):
        coordinator_pb2_grpc.CoordinatorStub(channel).GetStatus(coordinator_pb2.GetStatusRequest())


def test_a_slow_answer_is_a_deadline(server: CoordinatorServer, channel: Channel) -> None:
    release = threading.Event()
    server.implementation.before = release.wait
    stub = coordinator_pb2_grpc.CoordinatorStub(channel)
    with pytest.raises(errors.DeadlineExceeded), _rpc.as_shoal_errors(server.address):
        stub.GetStatus(coordinator_pb2.GetStatusRequest(), timeout=0.1)
    release.set()


@pytest.mark.parametrize("method", ["shoal.v1.Coordinator/GetStatus", "grpc.health.v1.Health/Check"])
def test_a_request_that_is_no_message_is_a_bad_request(channel: Channel, method: str) -> None:
    call: Any = channel.unary_unary(f"/{method}")
    with pytest.raises(errors.BadRequest, match="cannot be decoded"), _rpc.as_shoal_errors("it"):
        call(b"\xff\xff\xff", timeout=10)


def test_a_stream_ends_at_a_request_that_is_no_message(channel: Channel) -> None:
    call: Any = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
    with pytest.raises(errors.ShoalError) as caught, _rpc.as_shoal_errors("it"):
        list(call(iter([b"\xff\xff\xff"]), timeout=10))
    assert caught.value.status == "INVALID_ARGUMENT"


def test_an_error_about_half_a_surrogate_pair_can_be_sent() -> None:
    assert _rpc.error_of(_rpc.detail_of(errors.BadRequest("a \ud800 b", name="\ud800"))).message == "a ? b"


class Later(_rpc.LaterReply):
    """A reply that the test gives, perhaps after a second wait."""

    def __init__(self, result: Any) -> None:
        self.result, self.withdrawn = result, threading.Event()
        self.asked = threading.Event()
        self.call: Callable[[], object] = bool

    def on_end(self, call: Callable[[], object]) -> None:
        self.call = call
        self.asked.set()

    def withdraw(self) -> None:
        self.withdrawn.set()

    def finish(self) -> Any:
        if isinstance(self.result, Exception):
            raise self.result
        return self.result


class Late(Coordinator):
    """Returns a later reply to each call."""

    def __init__(self) -> None:
        self.replies: list[Later] = []

    @_rpc.servicer
    def GetStatus(self, request: coordinator_pb2.GetStatusRequest, context: ServicerContext) -> Any:
        self.replies.append(Later(coordinator_pb2.GetStatusReply(cluster=f"c{len(self.replies)}")))
        return self.replies[-1]


@pytest.fixture
def late() -> Iterator[tuple[Late, coordinator_pb2_grpc.CoordinatorStub]]:
    implementation, add = Late(), coordinator_pb2_grpc.add_CoordinatorServicer_to_server
    server = _rpc.RpcServer("127.0.0.1:0", [("shoal.v1.Coordinator", add, implementation)], threads=1)
    server.start()
    with _rpc.channel(server.address) as channel:
        yield implementation, coordinator_pb2_grpc.CoordinatorStub(channel)
    server.stop(0.1)


class TestLaterReplies:
    def test_more_calls_wait_than_there_are_threads(
        self, late: tuple[Late, coordinator_pb2_grpc.CoordinatorStub]
    ) -> None:
        implementation, stub = late
        calls = [stub.GetStatus.future(coordinator_pb2.GetStatusRequest(), timeout=20) for _ in range(5)]
        wait_until(lambda: len(implementation.replies) == 5 and all(it.asked.is_set() for it in implementation.replies))
        again, failed, *others = implementation.replies
        again.result = second = Later(again.result)
        failed.result = errors.Moved("elsewhere")
        for each in (again, failed, *others):
            each.call()
            each.call()  # a second time does nothing
        assert second.asked.wait(20)
        second.call()
        with _rpc.as_shoal_errors("server"):
            replies = {call.result().cluster for call in calls if not isinstance(call.exception(), RpcError)}
        assert replies == {"c0", "c2", "c3", "c4"}
        (error,) = [
            _rpc.error_from(error, "server") for call in calls if isinstance(error := call.exception(), RpcError)
        ]
        assert isinstance(error, errors.Moved)

    def test_a_reply_is_withdrawn_when_the_caller_is_gone(
        self, late: tuple[Late, coordinator_pb2_grpc.CoordinatorStub]
    ) -> None:
        implementation, stub = late
        call = stub.GetStatus.future(coordinator_pb2.GetStatusRequest(), timeout=20)
        wait_until(lambda: implementation.replies and implementation.replies[0].asked.is_set())
        call.cancel()
        assert implementation.replies[0].withdrawn.wait(20)
