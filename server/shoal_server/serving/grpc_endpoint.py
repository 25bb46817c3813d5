"""The server half of the transport by gRPC: handlers of Pull, Push, Assign and Commit."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any

import grpc
import structlog

from shoal import _rpc, _tracing, errors
from shoal._transport import take_message
from shoal._wire import Assembler, decode_push
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.serving import pushes
from shoal_server.serving.endpoint import Endpoint, EndpointConfig, EndpointFactory
from shoal_server.serving.pulls import PendingPull, replies
from shoal_server.serving.service import DataService, required
from shoal_server.shards import Shard, Stamp
from shoal_server.stall_detector import StallDetector

_log = structlog.get_logger(__name__)

Send = Callable[[bytes | None], None]


class GrpcEndpoint(Endpoint):
    """Answers data calls by gRPC, on threads for each kind.

    Args:
        service: that is called.
        config: of the server.
    """

    def __init__(self, service: DataService, config: EndpointConfig) -> None:
        self._service, self._config = service, config
        self._stalls = StallDetector(config.stall_s)

    def handlers(self) -> Mapping[str, Callable[..., Any]]:
        config = self._config
        # grpcio asks no more of a handler than to be callable.
        return {
            "Pull": _rpc.NonBlocking(self._pull, config.senders),
            "Push": _rpc.Pooled(self._push, config.receivers),
            "Assign": _rpc.Pooled(self._assign, config.receivers),
            "Commit": _rpc.Pooled(self._commit, config.committers),
        }

    def end_stalled(self) -> None:
        """Ends pulls that nobody reads and pushes that do not go on."""
        if ended := self._stalls.end():
            _log.warning("ended calls whose callers stalled", calls=ended)

    def _pull(self, request: pb.PullRequest, context: grpc.ServicerContext, send: Send) -> None:
        call = PullCall(
            self._service.shards_of(request),
            headers_only=request.headers_only,
            context=context,
            send=self._watched_send(send, context),
            senders=self._config.senders,
            on_sent=self._service.sent("grpc"),
            on_end=self._service.metrics.pulled,
            span=_tracing.server_span("Pull", request.stamp),
        )
        call.start(pushes.stamp_of(request.stamp), request.ahead)

    @_rpc.servicer
    def _push(self, request: Iterator[bytes], context: grpc.ServicerContext) -> pb.PushReply:
        return self._service.push(lambda: self._messages(self._watched(request, context)))

    @_rpc.servicer
    def _commit(self, request: pb.CommitRequest, _context: grpc.ServicerContext) -> pb.PushReply:
        return self._service.commit(request)

    @_rpc.servicer
    def _assign(self, request: Iterator[bytes], context: grpc.ServicerContext) -> pb.PushReply:
        return self._service.assign(*self._messages(self._watched(request, context)))

    def _messages(self, stream: Iterator[bytes]) -> tuple[pb.PushHeader, pushes.Source]:
        """The header of a push, and what it brings."""
        header, first = decode_push(next(stream, b""))

        def rest(assembler: Assembler) -> Iterator[tuple[pb.PushRequest, int]]:
            return (take_message(pb.PushRequest, message, assembler) for message in stream)

        return required(header), pushes.from_chunks(first, rest, self._service.received("grpc"))

    def _watched_send(self, send: Send, context: grpc.ServicerContext) -> Send:
        def watched(message: bytes | None) -> None:
            with self._stalls.waiting(context.cancel):
                send(message)

        return watched

    def _watched(self, stream: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        while True:
            with self._stalls.waiting(context.cancel):
                message = next(stream, None)
            if message is None:
                return
            yield message


class PullCall:
    """A pull by gRPC: it takes a thread only while it has something to send.

    Args:
        shards: to send, each as soon as it answers.
        headers_only: send no values: a barrier.
        context: of the call.
        send: sends a message and blocks until there is room for the next; None ends the stream.
        senders: lends a thread when a waiting shard answers.
        on_sent: told the bytes of each message's chunks.
        span: of the call; it ends with it.
        on_end: told, once all is sent, the seconds that it took beside the waiting for shards, and those of waiting.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        headers_only: bool,
        context: grpc.ServicerContext,
        send: Send,
        senders: Executor,
        on_sent: Callable[[int], object] = lambda _: None,
        span: _tracing.Span = _tracing.NOTHING,
        on_end: Callable[[float, float], None] = lambda _serving, _waited: None,
    ) -> None:
        self._pull, self._span = PendingPull(shards, self._wake, span), span
        self._headers_only, self._context, self._send, self._senders = headers_only, context, send, senders
        self._on_sent, self._on_end = on_sent, on_end
        self._began = time.perf_counter()
        self._unsent = len(shards)
        self._lock = threading.Lock()  # guards what follows; taken before the pull's
        self._sending = True  # a thread is in, or on its way to, `_send_ready`
        self._woken = False  # since that thread last looked
        self._over = False
        self._waits_since = self._waited_s = 0.0  # while no thread is sending

    def start(self, stamp: Stamp, ahead: int) -> None:
        """Asks all shards, then sends those that answered at once on this thread."""
        if not self._context.add_callback(self._end):
            return  # the caller is gone already
        self._pull.start(stamp, ahead)
        if self._over:  # it ended while the tickets were being left
            self._pull.abandon()
        self._send_ready()

    def _wake(self) -> None:
        with self._lock:
            self._woken = True
            wake = not self._sending and not self._over
            if wake:
                self._sending = True
                self._waited_s += time.perf_counter() - self._waits_since
        if wake:
            self._senders.submit(self._send_ready)

    def _end(self) -> None:
        """The call has ended, however. Called on grpc's only thread for events, which must not wait for a shard."""
        self._span.end()
        with self._lock:
            self._over = True
        if self._pull.waits:
            with suppress(RuntimeError):  # the pool is shut down, and the shards are closed
                self._senders.submit(self._pull.abandon)

    def _send_ready(self) -> None:
        try:
            while self._has_work():
                answers = self._pull.take()
                if not answers:
                    continue
                with replies(answers, headers_only=self._headers_only) as messages:
                    for pieces, nbytes in messages:
                        if self._over:
                            return
                        self._on_sent(nbytes)
                        self._send(b"".join(pieces))
                self._unsent -= len(answers)
                if not self._unsent:
                    self._span.end()
                    self._send(None)
                    self._on_end(time.perf_counter() - self._began - self._waited_s, self._waited_s)
                    return
        except errors.ShoalError as error:
            self._refuse(error)
        except Exception as error:
            _log.exception("pull failed")
            self._refuse(errors.InternalError(f"Pull failed: {type(error).__name__}: {error}"))

    def _has_work(self) -> bool:
        """Whether something came since this was last asked; if not, this thread is to go home."""
        with self._lock:
            work = self._woken and not self._over
            self._woken = False
            self._sending = work
            if not work:
                self._waits_since = time.perf_counter()
            return work

    def _refuse(self, error: errors.ShoalError) -> None:
        self._span.end(error)
        _rpc.refuse(self._context, error)
        self._send(None)


class GrpcEndpointFactory(EndpointFactory):
    """Every server has this half."""

    name = "grpc"

    def make(self, service: DataService, config: EndpointConfig) -> GrpcEndpoint:
        return GrpcEndpoint(service, config)


__all__ = ["GrpcEndpoint", "GrpcEndpointFactory"]
