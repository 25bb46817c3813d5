"""One Pull stream: it waits in its shards' memory, and takes a thread only while it has something to send."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

import grpc
import structlog

from shoal import _framing, _rpc, errors
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.shard import Shard, Stamp

_log = structlog.get_logger(__name__)

Send = Callable[[pb.PullReply | None], None]


@dataclass(eq=False, slots=True)
class _Ticket:
    """The stream's place in one shard."""

    call: "PullCall"
    shard: Shard

    def answer(self, step: int) -> None:
        self.call.ready(self, step)

    def refuse(self, error: errors.ShoalError) -> None:
        self.call.fail(error)


class PullCall:
    """A pull of some shards of one server.

    Args:
        shards: to send, each as soon as it answers.
        headers_only: send no values: a barrier.
        context: of the call.
        send: sends a message and blocks until there is room for the next; None ends the stream.
        senders: lends a thread when a waiting shard answers.
        on_sent: told the bytes of each message's chunks.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        *,
        headers_only: bool,
        context: grpc.ServicerContext,
        send: Send,
        senders: Executor,
        on_sent: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._tickets = [_Ticket(self, shard) for shard in shards]
        self._headers_only, self._context, self._send, self._senders = headers_only, context, send, senders
        self._on_sent = on_sent
        self._lock = threading.Lock()  # guards what follows; taken after no shard's lock and before none
        self._ready: list[tuple[_Ticket, int]] = []
        self._unanswered = self._unsent = len(shards)
        self._sending = True  # a thread is in, or on its way to, `_send_ready`
        self._error: errors.ShoalError | None = None
        self._over = False

    def start(self, stamp: Stamp) -> None:
        """Asks all shards, then sends those that answered at once on this thread."""
        if not self._context.add_callback(self._end):
            return  # the caller is gone already
        try:
            for ticket in self._tickets:
                ticket.shard.pull(ticket, stamp)
        except errors.ShoalError as error:
            self.fail(error)
        if self._over:  # it ended while the tickets were being left
            self._forget()
        self._send_ready()

    def ready(self, ticket: _Ticket, step: int) -> None:
        """A shard lets this pull through."""
        with self._lock:
            self._ready.append((ticket, step))
            self._unanswered -= 1
            wake = self._wake()
        if wake:
            self._senders.submit(self._send_ready)

    def fail(self, error: errors.ShoalError) -> None:
        """Ends the stream with an error."""
        with self._lock:
            self._error = self._error or error
            wake = self._wake()
        if wake:
            self._senders.submit(self._send_ready)

    def _wake(self) -> bool:
        wake = not self._sending and not self._over
        self._sending = self._sending or wake
        return wake

    def _end(self) -> None:
        """The call has ended, however. Called on grpc's only thread for events, which must not wait for a shard."""
        with self._lock:
            self._over = True
            waits = self._unanswered > 0
        if waits:
            with suppress(RuntimeError):  # the pool is shut down, and the shards are closed
                self._senders.submit(self._forget)

    def _forget(self) -> None:
        for ticket in self._tickets:
            ticket.shard.abandon(ticket)

    def _send_ready(self) -> None:
        try:
            while batch := self._next_batch():
                for message in self._messages(batch):
                    if self._over:
                        return
                    self._send(message)
                self._unsent -= len(batch)
                if not self._unsent:
                    self._send(None)
                    return
        except errors.ShoalError as error:
            self._refuse(error)
        except Exception as error:
            _log.exception("pull failed")
            self._refuse(errors.InternalError(f"Pull failed: {type(error).__name__}: {error}"))

    def _next_batch(self) -> list[tuple[_Ticket, int]]:
        """What can be sent now; empty if this thread is to go home. Raises the error that the stream is to end with."""
        with self._lock:
            batch, self._ready = self._ready, []
            if self._error and not self._over:
                raise self._error
            if self._over or not batch:
                self._sending = False
                return []
            return batch

    def _refuse(self, error: errors.ShoalError) -> None:
        _rpc.refuse(self._context, error)
        self._send(None)

    def _messages(self, batch: list[tuple[_Ticket, int]]) -> Iterator[pb.PullReply]:
        snapshots = [(ticket.shard, step, ticket.shard.snapshot()) for ticket, step in batch]
        headers = [
            header_pb2.ShardHeader(shard=shard.layout.shard, epoch=shard.epoch, version=snapshot.version, step=step)
            for shard, step, snapshot in snapshots
        ]
        if self._headers_only:
            yield pb.PullReply(headers=headers)
            return
        chunks = (
            chunk
            for shard, _, snapshot in snapshots
            for chunk in _framing.chunks(shard.layout.shard, enumerate(snapshot.arenas))
        )
        for group in _framing.messages(chunks):
            self._on_sent(sum(len(chunk.data) for chunk in group))
            yield pb.PullReply(headers=headers, chunks=group)
            headers = []
