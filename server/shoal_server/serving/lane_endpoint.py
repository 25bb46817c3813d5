"""Server half of lanes: sockets that carry the data calls at a lower cost than gRPC, with the same answers.

Each lane has a thread of its own, so a client that stalls or waits does not delay others. `parameter_server.proto`
defines lanes and their frames.
"""

import enum
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import numpy as np
import structlog
from google.protobuf.message import DecodeError, Message

from shoal import _rpc, _tracing, errors
from shoal._limits import catalogue
from shoal._security import REFUSALS, check_permitted
from shoal._system import host_id
from shoal._transport import (
    PARAMETER_SERVER,
    Connection,
    Frame,
    Listener,
    ListenerLimits,
    Segment,
    SegmentUnavailable,
    TicketSecurity,
    secured,
    send_error,
)
from shoal._wire import Buffer, decode_push, encode_values
from shoal._wire.limits import transfer_s
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.optimizers import conversions
from shoal_server.serving import pushes
from shoal_server.serving.chunk_frames import ChunkFrames
from shoal_server.serving.endpoint import Endpoint, EndpointConfig, EndpointFactory
from shoal_server.serving.pending_push import PendingPush, stamp_of
from shoal_server.serving.pending_reply import PendingReply
from shoal_server.serving.pulls import PendingPull, replies
from shoal_server.serving.service import DataService, PushReply, required
from shoal_server.shards import ValueReader

M = TypeVar("M", bound=Message)
_log = structlog.get_logger(__name__)

# The service of the calls on a lane, each of which has the name of its frame.
_SERVICE = pb.DESCRIPTOR.services_by_name["ParameterServer"].full_name
# Limits of a client's segment. The client allocates it, so it counts against the client's memory.
_MAX_REGIONS = 16
_MEMORY_PAGE = 4096


class LaneEndpoint(Endpoint):
    """Accepts lanes and serves them: the server half of the lane and shared-memory transports.

    Args:
        service: carries out the calls.
        config: the server's configuration. Lanes beyond its limit are refused, and their clients use gRPC.

    Raises:
        PortInUse: the port is taken.

    Attributes:
        offer: tells clients how to reach the endpoint; empty if lanes are disabled.
    """

    def __init__(self, service: DataService, config: EndpointConfig) -> None:
        self._config = config
        self._listener: Listener | None = None
        self.offer = pb.AttachReply()
        if config.lanes:
            token = secrets.token_bytes(32)
            self._listener = Listener(
                _rpc.listen(config.host, config.lane_port, "--lane-port"),
                PARAMETER_SERVER,
                lambda lane: LaneHandler(lane, service, on_outcome=config.on_outcome),
                limits=ListenerLimits(
                    catalogue.LANES, catalogue.HOST_LANES, most=config.lanes, most_of_host=config.host_lanes
                ),
                security=secured(TicketSecurity(token, config.authorizer, config.on_outcome), config.credentials),
                name="lane",
                advice="call it by gRPC",
            )
            address = f"{_rpc.public_host(config.host, config.advertise)}:{self._listener.address[1]}"
            self.offer = pb.AttachReply(address=address, token=token, host=host_id())

    def contribute(self, offer: pb.AttachReply) -> None:
        offer.MergeFrom(self.offer)

    def start(self, address: str) -> None:  # noqa: ARG002 - the port has its own address
        if self._listener:
            self._listener.start()

    def end_refused(self) -> None:
        if self._listener:
            self._listener.close_refused(self._config.authorizer.check_valid)

    @property
    def count(self) -> int:
        """Number of open lanes."""
        return self._listener.count if self._listener else 0

    def stop(self) -> None:
        """Closes all lanes and waits for their threads."""
        if self._listener:
            self._listener.stop()


class LaneEndpointFactory(EndpointFactory):
    """Makes the lane endpoint."""

    name = "lane"

    def make(self, service: DataService, config: EndpointConfig) -> LaneEndpoint:
        return LaneEndpoint(service, config)


class LaneHandler:
    """Serves the calls of one lane, in order.

    Args:
        lane: the accepted connection.
        service: carries out the calls.
        transport: transport under which bytes are counted, unless memory is shared.
        on_outcome: called with each call that is refused because of its caller's identity.
    """

    def __init__(
        self,
        lane: Connection,
        service: DataService,
        transport: str = "lane",
        on_outcome: _rpc.OnOutcome = lambda _: None,
    ) -> None:
        self._transport, self._on_outcome = transport, on_outcome
        self._lane, self._service, self._metrics = lane, service, service.metrics
        self._reader = ValueReader(lane.peer.rpartition(":")[0], lane.close)
        self._segment: Segment | None = None
        self._region_bytes = self._regions = 0
        self._poll = select.poll()
        self._poll.register(lane, select.POLLIN | select.POLLRDHUP)
        # Guards _awake, which is written to when a waiting pull is answered, possibly after the lane's end. No lock is
        # taken and nothing is awaited under it.
        self._lock = threading.Lock()
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._awake, select.POLLIN)
        self._calls: dict[enum.IntEnum, Callable[[memoryview], None]] = {
            Frame.PULL: self._pull,
            Frame.PUSH: self._push,
            Frame.COMMIT: self._commit,
            Frame.REPLICA: self._replica,
        }

    def welcome(self, hello: pb.LaneHello) -> pb.LaneWelcome:
        """Answers the client's hello, and opens the segment that it shares."""
        welcome = pb.LaneWelcome()
        if hello.HasField("segment"):
            self._share(hello.segment, welcome)
            self._metrics.offered(shared=welcome.shared)
        return welcome

    def serve(self) -> None:
        """Serves the client's calls until it disconnects.

        Raises:
            Unreachable: the client disconnected.
            ShoalError: the client sent an invalid message, or stalls.
        """
        _rpc.set_caller(self._lane.identity)  # for all calls of this thread
        with self._metrics.lane("shared_memory" if self._segment else self._transport):
            while True:
                self._answer()

    def close(self) -> None:
        """Frees all resources except the connection."""
        with self._lock:
            os.close(self._awake)
            self._awake = -1
        if self._segment:
            self._segment.close()

    def _share(self, offer: pb.Segment, welcome: pb.LaneWelcome) -> None:
        if not 0 < offer.regions <= _MAX_REGIONS:
            welcome.reason = f"it has {offer.regions} regions; the server accepts 1 to {_MAX_REGIONS}"
            return
        if offer.region_bytes % _MEMORY_PAGE:
            welcome.reason = f"its regions have {offer.region_bytes} bytes; that must be a multiple of {_MEMORY_PAGE}"
            return
        try:
            self._segment = Segment.open(offer.name, offer.regions * offer.region_bytes, offer.nonce)
        except SegmentUnavailable as error:
            welcome.reason = str(error)
            _log.info("refused a client's shared memory", client=self._lane.peer, reason=welcome.reason)
            return
        self._regions, self._region_bytes = offer.regions, offer.region_bytes
        welcome.shared = True

    # Calls.

    def _answer(self) -> None:
        kind, payload = self._lane.receive()
        call = self._calls.get(kind)
        if call is None:
            raise errors.BadFrame(f"{self._lane.peer} sent {kind.name}; a call was expected")
        name, who = f"{_SERVICE}/{kind.name.title()}", self._lane.identity
        try:
            if who is not None and kind is not Frame.REPLICA:  # its own check comes later
                check_permitted(who, name)
            call(payload)
        except errors.ShoalError as error:
            if error.status in REFUSALS:
                host = self._lane.peer.rpartition(":")[0]
                self._on_outcome(_rpc.CallOutcome(name, who, host, error.status, reason=error.message))
            if self._lane.closed:
                raise
            send_error(self._lane, error)
        except Exception as error:
            _log.exception("a call on a lane failed", call=kind.name)
            send_error(self._lane, errors.InternalError(f"{kind.name} failed: {type(error).__name__}: {error}"))

    def _pull(self, payload: memoryview) -> None:
        start = time.perf_counter()
        request = _decoded(pb.PullRequest, payload)
        with _tracing.server_span("Pull", request.stamp) as span:
            waited_s = self._answer_pull(request, span)
        self._metrics.pulled(time.perf_counter() - start - waited_s, waited_s)

    def _answer_pull(self, request: pb.PullRequest, span: _tracing.Span) -> float:
        """Sends the values of a pull; returns the seconds that it waited for its consistency mode."""
        waited_s = 0.0
        if request.slot:
            raise errors.BadRequest("a pull on a lane names an optimizer slot; pull slots by gRPC")
        region = None if request.headers_only or not request.region else self._region(request.region)
        pull = self._service.pull(request, self._wake, span, self._reader)
        if region is not None and pull.shards.layout.region_bytes > region.size:
            raise errors.BadRequest(
                f"a pull of {pull.shards.layout.region_bytes} bytes does not fit into a region of {region.size} bytes"
            )
        try:
            pull.start(stamp_of(request.stamp), request.ahead)
            while (step := pull.take()) is None or not pull.ready(headers_only=request.headers_only):
                waited_s += self._wait()
            if region is None:
                self._send_values(pull, step, headers_only=request.headers_only)
            else:
                self._write_values(pull, step, region)
        except BaseException:
            pull.abandon()
            raise
        return waited_s

    def _wake(self) -> None:
        with self._lock:
            if self._awake >= 0:
                os.eventfd_write(self._awake, 1)

    def _wait(self) -> float:
        """Waits until the pull may have an answer to take; returns the seconds that it waited."""
        start = time.perf_counter()
        for descriptor, happened in self._poll.poll():
            if descriptor != self._awake:
                self._lane.close()
                if happened == select.POLLIN:
                    raise errors.BadFrame(f"{self._lane.peer} sent data while its pull was waiting")
                raise errors.Unreachable(f"{self._lane.peer} disconnected while its pull was waiting")
        os.eventfd_read(self._awake)
        return time.perf_counter() - start

    def _send_values(self, pull: PendingPull, step: int, *, headers_only: bool) -> None:
        sent = self._service.sent(self._transport)

        def counted(messages: Iterator[tuple[list[Buffer], int]]) -> Iterator[list[Buffer]]:
            for pieces, nbytes in messages:
                sent(nbytes)
                yield pieces

        with replies(pull, step, headers_only=headers_only) as messages:
            self._lane.stream(Frame.VALUES, counted(messages), within_s=transfer_s(pull.shards.layout.nbytes))

    def _write_values(self, pull: PendingPull, step: int, region: np.ndarray) -> None:
        targets = pull.shards.layout.arrays(region).values()
        with pull.read() as reading:
            conversions.send_all([*zip(targets, reading.values, strict=True)])
        self._service.sent("shared_memory")(pull.shards.layout.nbytes)
        headers = pull.shards.headers.of_values(reading.version, step)
        self._lane.send(Frame.VALUES, encode_values(headers, []), end=True)

    def _push(self, payload: memoryview) -> None:
        stream = ChunkFrames(self._lane)

        def read() -> tuple[pb.PushHeader, pushes.PushSource]:
            first, chunks = decode_push(payload)
            header = required(first)
            region = self._region(header.region) if header.region else None
            if region is not None:
                return header, pushes.from_region(region, self._service.received("shared_memory"))
            return header, pushes.from_chunks(chunks, stream.take, self._service.received(self._transport))

        try:
            reply = self._service.push(read, self._await_permit, end=self._lane.close)
        finally:
            stream.drain()
        self._send_reply(reply)

    def _await_permit(self, push: PendingPush) -> None:
        """Waits without reading the gradient, which stays in the client's memory."""
        self._lane.send(Frame.WAIT)
        push.on_answer(self._wake)
        self._await_end(push)
        self._lane.send(Frame.GO if push.goes_on else Frame.END)

    def _await_end(self, waiting: PendingPush | PendingReply[bytes]) -> None:
        """Waits until a push or a reply does not wait any more, or the client disconnects."""
        ends = select.poll()  # not for data, which may have been sent before the client knew that it has to wait
        ends.register(self._awake, select.POLLIN)
        with suppress(ValueError):  # another thread has closed the lane
            ends.register(self._lane, select.POLLRDHUP)
        while waiting.waits:
            if self._lane.closed or any(descriptor != self._awake for descriptor, _ in ends.poll()):
                self._lane.close()
                raise errors.Unreachable(f"{self._lane.peer} disconnected while its push was waiting")
            os.eventfd_read(self._awake)

    def _commit(self, payload: memoryview) -> None:
        self._send_reply(self._service.commit(_decoded(pb.CommitRequest, payload)))

    def _replica(self, payload: memoryview) -> None:
        """Serves the connection of a replica, to its end."""
        try:
            self._service.backups.serve(self._lane, payload, self._region)
        finally:
            self._lane.close()

    def _send_reply(self, reply: PushReply) -> None:
        while not isinstance(reply, bytes):
            reply.on_end(self._wake)
            try:
                self._await_end(reply)
            except BaseException:
                reply.withdraw()
                raise
            reply = reply.finish()
        self._lane.send(Frame.PUSHED, [reply])

    def _region(self, number: int) -> np.ndarray:
        """Returns the bytes of a region of the segment.

        Raises:
            BadRequest: there is no such region, or the client has truncated its segment.
        """
        if not self._segment or not 0 < number <= self._regions:
            raise errors.BadRequest(
                f"a call names region {number} of shared memory; this lane has {self._regions} regions"
            )
        try:
            return np.frombuffer(self._segment.view((number - 1) * self._region_bytes, self._region_bytes), np.uint8)
        except SegmentUnavailable as error:
            self._segment.close()
            self._segment, self._regions = None, 0
            raise errors.BadRequest(f"the memory that {self._lane.peer} shares is lost: {error}") from None


def _decoded(kind: type[M], payload: memoryview) -> M:
    try:
        return kind.FromString(bytes(payload))
    except DecodeError as error:
        raise errors.BadRequest(f"a {kind.__name__} cannot be decoded: {error}") from None
