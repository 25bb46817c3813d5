"""Lanes: sockets on which workers pull, push and commit with less work than by gRPC; the same calls, the same answers.

A lane has a thread of its own, which belongs to its client as the socket does: a client that stalls, or waits for its
turn, holds up nobody else. What a lane is, and its frames, are in `parameter_server.proto`.
"""

import enum
import os
import secrets
import select
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeVar

import numpy as np
import structlog
from google.protobuf.message import DecodeError, Message

from shoal import _rpc, _tracing, errors
from shoal._system import host_id
from shoal._transport import (
    PARAMETER_SERVER,
    STALL_S,
    Connection,
    Frame,
    Listener,
    Segment,
    SegmentUnavailable,
    TokenSecurity,
    send_error,
    take_frame,
)
from shoal._wire import (
    ArenaKey,
    Assembler,
    Buffer,
    arenas_of,
    decode_push,
    encode_values,
    region_arrays,
    region_offsets,
)
from shoal._wire.limits import transfer_s
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.optimizers import conversions
from shoal_server.serving import pushes
from shoal_server.serving.endpoint import Endpoint, EndpointConfig, EndpointFactory
from shoal_server.serving.pulls import PendingPull, PullGrant, read, replies
from shoal_server.serving.service import DataService, required

M = TypeVar("M", bound=Message)
_log = structlog.get_logger(__name__)

# Of a client's claims about its segment. Memory is taken by the client, from its own user's share.
_MAX_SLOTS = 16
_PAGE = 4096


class LaneEndpoint(Endpoint):
    """Accepts lanes and serves them: the server half of the transports by lane and by shared memory.

    Args:
        service: that is called.
        config: of the server; beyond its limit of lanes, more are refused, and their clients use gRPC.

    Raises:
        PortInUse: the port is taken.

    Attributes:
        offer: tells clients how to reach it; empty if there are no lanes.
    """

    def __init__(self, service: DataService, config: EndpointConfig) -> None:
        self._listener: Listener | None = None
        self.offer = pb.AttachReply()
        if config.lanes:
            token = secrets.token_bytes(32)
            self._listener = Listener(
                _rpc.listen(config.host, config.lane_port),
                PARAMETER_SERVER,
                lambda lane: LaneHandler(lane, service),
                security=TokenSecurity(token),
                limit=config.lanes,
                name="lane",
                advice="call it by gRPC",
            )
            address = f"{_rpc.public_host(config.host, config.advertise)}:{self._listener.address[1]}"
            self.offer = pb.AttachReply(address=address, token=token, host=host_id())

    def contribute(self, offer: pb.AttachReply) -> None:
        offer.MergeFrom(self.offer)

    def start(self, address: str) -> None:  # noqa: ARG002 - a port has an address of its own
        if self._listener:
            self._listener.start()

    @property
    def count(self) -> int:
        """Lanes that are open."""
        return self._listener.count if self._listener else 0

    def stop(self) -> None:
        """Closes all lanes, and waits for their threads."""
        if self._listener:
            self._listener.stop()


class LaneEndpointFactory(EndpointFactory):
    """Makes the port for lanes."""

    name = "lane"

    def make(self, service: DataService, config: EndpointConfig) -> LaneEndpoint:
        return LaneEndpoint(service, config)


class LaneHandler:
    """One lane's calls, in order.

    Args:
        lane: just accepted.
        service: that is called.
        transport: name of the transport whose bytes are counted, unless memory is shared.
    """

    def __init__(self, lane: Connection, service: DataService, transport: str = "lane") -> None:
        self._transport = transport
        self._lane, self._service, self._metrics = lane, service, service.metrics
        self._segment: Segment | None = None
        self._slot_bytes = self._slots = 0
        self._poll = select.poll()
        self._poll.register(lane, select.POLLIN | select.POLLRDHUP)
        # Guards _awake, which is written to when a waiting pull is answered, perhaps only after the lane's end. Taken
        # last; nothing is waited for under it.
        self._lock = threading.Lock()
        self._awake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll.register(self._awake, select.POLLIN)
        self._calls: dict[enum.IntEnum, Callable[[memoryview], None]] = {
            Frame.PULL: self._pull,
            Frame.PUSH: self._push,
            Frame.COMMIT: self._commit,
        }

    def welcome(self, hello: pb.LaneHello) -> pb.LaneWelcome:
        """Answers the client's hello, and opens the memory that it shares."""
        welcome = pb.LaneWelcome()
        if hello.HasField("segment"):
            self._share(hello.segment, welcome)
            self._metrics.offered(shared=welcome.shared)
        return welcome

    def serve(self) -> None:
        """Answers the client's calls, until it leaves.

        Raises:
            Unreachable: it left.
            ShoalError: what it sent makes no sense, or it stalls.
        """
        with self._metrics.lane("shared_memory" if self._segment else self._transport):
            while True:
                self._answer()

    def close(self) -> None:
        """Frees what it holds, but for the lane."""
        with self._lock:
            os.close(self._awake)
            self._awake = -1
        if self._segment:
            self._segment.close()

    def _share(self, offer: pb.Segment, welcome: pb.LaneWelcome) -> None:
        if not 0 < offer.slots <= _MAX_SLOTS:
            welcome.reason = f"it has {offer.slots} slots; 1 to {_MAX_SLOTS} are taken"
            return
        if offer.region_bytes % _PAGE:
            welcome.reason = f"its slots of {offer.region_bytes} bytes are not whole pages of {_PAGE}"
            return
        try:
            self._segment = Segment.open(offer.name, offer.slots * offer.region_bytes, offer.nonce)
        except SegmentUnavailable as error:
            welcome.reason = str(error)
            _log.info("a client's memory is not shared", client=self._lane.peer, reason=welcome.reason)
            return
        self._slots, self._slot_bytes = offer.slots, offer.region_bytes
        welcome.shared = True

    # Calls.

    def _answer(self) -> None:
        kind, payload = self._lane.receive()
        call = self._calls.get(kind)
        if call is None:
            raise errors.BadFrame(f"{self._lane.peer} sent {kind.name} where a call belongs")
        try:
            call(payload)
        except errors.ShoalError as error:
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
        """Sends what a pull asks for; returns the seconds that it waited for its consistency mode."""
        waited_s = 0.0
        shards = self._service.shards_of(request)
        slot = None if request.headers_only or not request.slot else self._slot(request.slot)
        targets: dict[ArenaKey, np.ndarray] = {}
        if slot is not None:
            layouts = [shard.layout for shard in shards]
            _, end = region_offsets(layouts)
            if end > slot.size:
                raise errors.BadRequest(f"a pull of {end} bytes does not fit into a slot of {slot.size}")
            targets = region_arrays(slot, layouts)
        pull = PendingPull(shards, self._wake, span)
        try:
            pull.start(pushes.stamp_of(request.stamp), request.ahead)
            unanswered = len(shards)
            while unanswered:
                answers = pull.take()
                unanswered -= len(answers)
                if not answers:
                    waited_s += self._wait()
                elif slot is None:
                    self._send_values(answers, headers_only=request.headers_only, last=not unanswered)
                else:
                    self._write_values(answers, targets, last=not unanswered)
        finally:
            if pull.waits:
                pull.abandon()
        return waited_s

    def _wake(self) -> None:
        with self._lock:
            if self._awake >= 0:
                os.eventfd_write(self._awake, 1)

    def _wait(self) -> float:
        """Until a shard may have answered; for how many seconds."""
        start = time.perf_counter()
        for descriptor, happened in self._poll.poll():
            if descriptor != self._awake:
                self._lane.close()
                if happened == select.POLLIN:
                    raise errors.BadFrame(f"{self._lane.peer} spoke while its pull was waiting")
                raise errors.Unreachable(f"{self._lane.peer} left while its pull was waiting")
        os.eventfd_read(self._awake)
        return time.perf_counter() - start

    def _send_values(self, answers: Sequence[PullGrant], *, headers_only: bool, last: bool) -> None:
        sent = self._service.sent(self._transport)

        def counted(messages: Iterator[tuple[list[Buffer], int]]) -> Iterator[list[Buffer]]:
            for pieces, nbytes in messages:
                sent(nbytes)
                yield pieces

        with replies(answers, headers_only=headers_only) as messages:
            nbytes = sum(answer.shard.layout.nbytes for answer in answers)
            self._lane.stream(Frame.VALUES, counted(messages), end=last, within_s=transfer_s(nbytes))

    def _write_values(
        self, answers: Sequence[PullGrant], targets: Mapping[ArenaKey, np.ndarray], *, last: bool
    ) -> None:
        keys = arenas_of(answer.shard.layout for answer in answers)
        with read(answers) as (headers, snapshots):
            values = chain.from_iterable(snapshot.values for snapshot in snapshots)
            conversions.send_all([(targets[key], arena) for key, arena in zip(keys, values, strict=True)])
        self._service.sent("shared_memory")(sum(answer.shard.layout.nbytes for answer in answers))
        self._lane.send(Frame.VALUES, encode_values(headers, []), end=last)

    def _push(self, payload: memoryview) -> None:
        stream = _ChunkFrames(self._lane)

        def read() -> tuple[pb.PushHeader, pushes.Source]:
            first, chunks = decode_push(payload)
            header = required(first)
            slot = self._slot(header.slot) if header.slot else None
            if slot is not None:
                return header, pushes.from_region(slot, self._service.received("shared_memory"))
            return header, pushes.from_chunks(chunks, stream.take, self._service.received(self._transport))

        try:
            reply = self._service.push(read)
        finally:
            stream.drain()
        self._send_reply(reply)

    def _commit(self, payload: memoryview) -> None:
        self._send_reply(self._service.commit(_decoded(pb.CommitRequest, payload)))

    def _send_reply(self, reply: pb.PushReply) -> None:
        self._lane.send(Frame.PUSHED, [reply.SerializeToString()])

    def _slot(self, number: int) -> np.ndarray:
        """A slot's bytes.

        Raises:
            BadRequest: there is no such slot, or the client has cut its segment short.
        """
        if not self._segment or not 0 < number <= self._slots:
            raise errors.BadRequest(f"a call names slot {number}; this lane has {self._slots} of shared memory")
        try:
            return np.frombuffer(self._segment.view((number - 1) * self._slot_bytes, self._slot_bytes), np.uint8)
        except SegmentUnavailable as error:
            self._segment.close()
            self._segment, self._slots = None, 0
            raise errors.BadRequest(f"the memory that {self._lane.peer} shares is lost: {error}") from None


class _ChunkFrames:
    """The rest of a push: frames with chunks, and an END."""

    def __init__(self, lane: Connection) -> None:
        self._lane = lane
        self._ended = False

    def take(self, assembler: Assembler) -> Iterator[tuple[pb.PushRequest, int]]:
        """Has an assembler take the chunks of each message: the message without them, and their bytes."""
        while self._more():
            yield take_frame(pb.PushRequest, self._lane, assembler)

    def drain(self) -> None:
        """Reads what is left, so that the lane is at the beginning of the next call."""
        while not self._ended and not self._lane.closed and self._more():
            self._lane.payload()

    def _more(self) -> bool:
        kind = self._lane.begin(within_s=STALL_S)
        self._ended = kind is Frame.END
        if kind not in (Frame.PUSH, Frame.END):
            self._lane.close()
            raise errors.BadFrame(f"{self._lane.peer} sent {kind.name} in the middle of a push")
        if self._ended:
            self._lane.payload()
        return not self._ended


def _decoded(kind: type[M], payload: memoryview) -> M:
    try:
        return kind.FromString(bytes(payload))
    except DecodeError as error:
        raise errors.BadRequest(f"a {kind.__name__} cannot be read: {error}") from None
