"""Server half of the gRPC transport: handlers of Pull, Push, Assign and Commit."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeAlias

import grpc
import structlog

from shoal import _rpc, _tracing, errors
from shoal._transport import read_message
from shoal._wire import Assembler, Chunk, decode_push
from shoal._wire.limits import transfer_s
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.serving import pushes
from shoal_server.serving.endpoint import Endpoint, EndpointConfig, EndpointFactory
from shoal_server.serving.pending_push import PendingPush, stamp_of
from shoal_server.serving.pending_reply import PendingReply
from shoal_server.serving.pulls import replies
from shoal_server.serving.service import DataService, PushReply, required
from shoal_server.shards import Stamp, ValueReader
from shoal_server.stall_detector import StallDetector

_log = structlog.get_logger(__name__)

Send = Callable[[bytes | None], None]
_PushReply: TypeAlias = pb.PushReply | PendingReply[pb.PushReply]


class GrpcEndpoint(Endpoint):
    """Answers data calls over gRPC, with separate threads for each kind of call.

    Args:
        service: carries out the calls.
        config: the server's configuration.
    """

    def __init__(self, service: DataService, config: EndpointConfig) -> None:
        self._service, self._config = service, config
        self._clock = config.clock
        self._stall_detector = StallDetector(config.stall_s, config.clock)
        # Pushes between their first message and their handler, by the identity of that message; each entry keeps it.
        self._opened: dict[int, _OpenedPush] = {}

    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        config = self._config
        # For grpcio, a handler only needs to be callable.
        return {
            "Pull": _rpc.NonBlocking(self._pull, config.senders),
            "Push": _rpc.Pooled(self._push, config.receivers, hold=self._hold),
            "Assign": _rpc.Pooled(self._assign, config.receivers),
            "Commit": _rpc.Pooled(self._commit, config.committers),
        }

    def end_stalled(self) -> None:
        """Ends pulls that are not read and pushes that do not continue, or wait longer than their deadline allows."""
        now = self._clock()
        for opened in [*self._opened.values()]:
            if opened.since + self._config.stall_s <= now:
                opened.push.refuse(_repeat())
        self._service.waits.end_late()
        if ended := self._stall_detector.end():
            _log.warning("ended calls whose callers stalled", calls=ended)

    def _pull(self, request: pb.PullRequest, context: grpc.ServicerContext, send: Send) -> None:
        call = PullCall(
            self._service,
            request,
            context=context,
            send=self._watched_send(send, context),
            senders=self._config.senders,
            span=_tracing.server_span("Pull", request.stamp),
        )
        call.start(stamp_of(request.stamp), request.ahead)

    def _hold(self, message: bytes | None, go_on: Callable[[], None]) -> Callable[[], None] | None:
        """Opens a push before it has a thread of its own, so that it holds none while it waits for a permit."""
        try:
            header, first = decode_push(message or b"")
            push = self._service.open_push(required(header))
        except errors.ShoalError:
            return None  # the handler raises it
        self._opened[id(message)] = _OpenedPush(message, first, push, self._clock())
        if not push.waits:
            return None
        push.on_answer(go_on)

        def gone() -> None:
            self._opened.pop(id(message), None)
            push.withdraw()
            go_on()

        return gone

    @_rpc.servicer
    def _push(self, request: Iterator[bytes], context: grpc.ServicerContext) -> _PushReply:
        stream = self._watched(request, context)
        message = next(stream, b"")
        if opened := self._opened.pop(id(message), None):
            return _reply(self._service.finish_push(opened.push, self._source(opened.chunks, stream), context.cancel))
        return _reply(
            self._service.push(lambda: self._messages(chain((message,), stream)), self._wait, end=context.cancel)
        )

    def _wait(self, push: PendingPush) -> None:
        # Only if `_hold` was not called, because this version of grpcio is not supported.
        push.wait(self._config.stall_s)
        push.refuse(_repeat())

    @_rpc.servicer
    def _commit(self, request: pb.CommitRequest, _context: grpc.ServicerContext) -> _PushReply:
        return _reply(self._service.commit(request))

    @_rpc.servicer
    def _assign(self, request: Iterator[bytes], context: grpc.ServicerContext) -> _PushReply:
        return _reply(self._service.assign(*self._messages(self._watched(request, context))))

    def _messages(self, stream: Iterator[bytes]) -> tuple[pb.PushHeader, pushes.PushSource]:
        """Returns the header of a push, and the source of its payload."""
        header, first = decode_push(next(stream, b""))
        return required(header), self._source(first, stream)

    def _source(self, first: Sequence[Chunk], stream: Iterator[bytes]) -> pushes.PushSource:
        def rest(assembler: Assembler) -> Iterator[tuple[pb.PushRequest, int]]:
            return (read_message(pb.PushRequest, message, assembler) for message in stream)

        return pushes.from_chunks(first, rest, self._service.received("grpc"))

    def _watched_send(self, send: Send, context: grpc.ServicerContext) -> Send:
        # One deadline in all, as for `_watched`: a caller that reads little does make progress, and values that it
        # reads take memory.
        started, sent = 0.0, 0

        def watched(message: bytes | None) -> None:
            nonlocal started, sent
            started = started or self._clock()
            left = started + transfer_s(sent) - self._clock()
            with self._stall_detector.waiting(context.cancel, left):
                send(message)
            sent += len(message or b"")

        return watched

    def _watched(self, stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        # One deadline in all, which grows with the bytes: a caller that sends little messages does make progress.
        started, received = self._clock(), 0
        while True:
            left = started + transfer_s(received) - self._clock()
            with self._stall_detector.waiting(context.cancel, left):
                message = next(stream, None)
            if message is None:
                return
            received += len(message)
            yield message


@dataclass(frozen=True, slots=True)
class _OpenedPush:
    """A push that has no thread yet.

    Attributes:
        message: the first message.
        chunks: its chunks.
        push: the push.
        since: when it was opened.
    """

    message: bytes | None
    chunks: Sequence[Chunk]
    push: PendingPush
    since: float


def _reply(encoded: PushReply) -> _PushReply:
    if isinstance(encoded, bytes):
        return pb.PushReply.FromString(encoded)
    return encoded.then(pb.PushReply.FromString)


def _repeat() -> errors.DeadlineExceeded:
    return errors.DeadlineExceeded(
        "the push waits for gradients of lower ranks, and its call would reach its deadline; repeat it", waits="permit"
    )


class PullCall:
    """A pull over gRPC. It takes a thread only while it has values to send.

    Args:
        service: carries out the pull, and counts it.
        request: names the shards.
        context: context of the call.
        send: sends a message and blocks until there is room for the next one; None ends the stream.
        senders: lends a thread when a waiting pull is answered.
        span: tracing span of the call, ended with it.
    """

    def __init__(
        self,
        service: DataService,
        request: pb.PullRequest,
        *,
        context: grpc.ServicerContext,
        send: Send,
        senders: Executor,
        span: _tracing.Span = _tracing.NOTHING,
    ) -> None:
        reader = ValueReader(_rpc.host_in(context.peer()), context.cancel)
        self._pull, self._span = service.pull(request, self._wake, span, reader), span
        self._headers_only, self._context, self._send, self._senders = request.headers_only, context, send, senders
        self._on_sent, self._on_end = service.sent("grpc"), service.metrics.pulled
        self._began = time.perf_counter()
        self._lock = threading.Lock()  # guards what follows; taken before the pending pull's lock
        self._sending = True  # whether a thread runs `_send_ready` or is about to
        self._woken = False  # whether there is news since that thread last looked
        self._over = False
        self._waiting_since = self._waited_s = 0.0  # set while no thread is sending

    def start(self, stamp: Stamp, ahead: int) -> None:
        """Asks for the values, and sends them on this thread if they are there at once.

        Args:
            stamp: worker, incarnation and step.
            ahead: steps after the stamp's step for which the values are wanted.
        """
        if not self._context.add_callback(self._end):
            return  # the caller is already gone
        self._pull.start(stamp, ahead)
        if self._over:  # the call ended while it asked for the values
            self._pull.abandon()
        self._send_ready()

    def _wake(self) -> None:
        with self._lock:
            self._woken = True
            wake = not self._sending and not self._over
            if wake:
                self._sending = True
                self._waited_s += time.perf_counter() - self._waiting_since
        if wake:
            self._senders.submit(self._send_ready)

    def _end(self) -> None:
        """Handles the end of the call. It runs on gRPC's only event thread, which must not wait for a shard."""
        self._span.end()
        with self._lock:
            self._over = True
        if self._pull.waits:
            with suppress(RuntimeError):  # the pool is shut down, so the shards are closed
                self._senders.submit(self._pull.abandon)

    def _send_ready(self) -> None:
        try:
            while self._has_work():
                step = self._pull.take()
                if step is None or not self._pull.ready(headers_only=self._headers_only):
                    continue
                with replies(self._pull, step, headers_only=self._headers_only) as messages:
                    for pieces, nbytes in messages:
                        if self._over:
                            return
                        self._on_sent(nbytes)
                        self._send(b"".join(pieces))
                self._span.end()
                self._send(None)
                self._on_end(time.perf_counter() - self._began - self._waited_s, self._waited_s)
                return
        except errors.ShoalError as error:
            self._refuse(error)
        except Exception as error:
            _log.exception("pull failed")
            self._refuse(errors.InternalError(f"Pull failed: {type(error).__name__}: {error}"))
        finally:
            if self._over:  # perhaps while this thread read the values, so that `_end` has not ended the pull
                self._pull.drop()

    def _has_work(self) -> bool:
        """Returns whether there is news since the last call; if not, this thread must return to its pool."""
        with self._lock:
            work = self._woken and not self._over
            self._woken = False
            self._sending = work
            if not work:
                self._waiting_since = time.perf_counter()
            return work

    def _refuse(self, error: errors.ShoalError) -> None:
        self._pull.drop()
        self._span.end(error)
        _rpc.refuse(self._context, error)
        self._send(None)


class GrpcEndpointFactory(EndpointFactory):
    """Makes the gRPC endpoint, which every server has."""

    name = "grpc"

    def make(self, service: DataService, config: EndpointConfig) -> GrpcEndpoint:
        return GrpcEndpoint(service, config)


__all__ = ["GrpcEndpoint", "GrpcEndpointFactory"]
