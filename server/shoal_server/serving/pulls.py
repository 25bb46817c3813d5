"""One pull: it waits in its shards' memory, and is answered when they let it through."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain

import grpc
import structlog

from shoal import _rpc, _tracing, errors
from shoal._wire.chunks import Buffer, encode_values
from shoal._wire.framing import messages
from shoal.v1 import header_pb2
from shoal_server.shards import Shard, Snapshot, Stamp

_log = structlog.get_logger(__name__)

Send = Callable[[bytes | None], None]


@dataclass(frozen=True, slots=True)
class Answer:
    """A shard lets a pull through: its worker is to take this step next."""

    shard: Shard
    step: int

    def header(self, version: int) -> header_pb2.ShardHeader:
        """What the reply says of the shard, whose values are at this version."""
        return header_pb2.ShardHeader(
            shard=self.shard.layout.shard, epoch=self.shard.epoch, version=version, step=self.step
        )


@dataclass(eq=False, slots=True)
class _Ticket:
    """The pull's place in one shard."""

    pull: "PendingPull"
    shard: Shard

    def answer(self, step: int) -> None:
        self.pull.answered(Answer(self.shard, step))

    def refuse(self, error: errors.ShoalError) -> None:
        self.pull.refused(error)


class PendingPull:
    """A pull's tickets in some shards, and what they answered. Holds no thread.

    Args:
        shards: that are asked.
        wake: called, from any thread and without any shard's lock, when there is something to `take`.
        span: of the call, which whoever sends the answers ends.
    """

    def __init__(
        self, shards: Sequence[Shard], wake: Callable[[], None], span: _tracing.Span = _tracing.NOTHING
    ) -> None:
        self._tickets = [_Ticket(self, shard) for shard in shards]
        self._wake = wake
        self._waiting = span.child("wait")
        self._lock = threading.Lock()  # guards what follows; taken after no shard's lock and before none
        self._answers: list[Answer] = []
        self._error: errors.ShoalError | None = None
        self._unanswered = len(shards)

    def start(self, stamp: Stamp, ahead: int) -> None:
        """Asks all shards; some may answer at once."""
        try:
            for ticket in self._tickets:
                ticket.shard.pull(ticket, stamp, ahead)
        except errors.ShoalError as error:
            self.refused(error)

    def answered(self, answer: Answer) -> None:
        """A shard lets this pull through."""
        with self._lock:
            self._answers.append(answer)
            self._unanswered -= 1
            answered = not self._unanswered
        if answered:
            self._waiting.end()
        self._wake()

    def refused(self, error: errors.ShoalError) -> None:
        """It is not to be answered."""
        with self._lock:
            self._error = self._error or error
        self._waiting.end(error)
        self._wake()

    def take(self) -> list[Answer]:
        """What has been answered since the last time.

        Raises:
            ShoalError: what the pull was refused with.
        """
        with self._lock:
            if self._error:
                raise self._error
            answers, self._answers = self._answers, []
            return answers

    @property
    def waits(self) -> bool:
        """Whether it still has a place in some shard."""
        with self._lock:
            return self._unanswered > 0

    def abandon(self) -> None:
        """Takes its tickets back: nobody wants the answer any more."""
        self._waiting.end()
        for ticket in self._tickets:
            ticket.shard.abandon(ticket)


@contextmanager
def read(answers: Sequence[Answer]) -> Iterator[tuple[list[header_pb2.ShardHeader], list[Snapshot]]]:
    """What the reply says of each shard, and the values to send, which stay as they are until `with` ends."""
    with ExitStack() as reading:
        snapshots = [reading.enter_context(answer.shard.read()) for answer in answers]
        yield [answer.header(values.version) for answer, values in zip(answers, snapshots, strict=True)], snapshots


@contextmanager
def replies(answers: Sequence[Answer], *, headers_only: bool) -> Iterator[Iterator[tuple[list[Buffer], int]]]:
    """The messages that answer a pull of these shards: each in pieces, and the bytes of its chunks.

    They are good until `with` ends: they lie in the shards' own memory.
    """
    if headers_only:
        headers = [answer.header(answer.shard.version) for answer in answers]
        yield iter([(encode_values(headers, []), 0)])
        return
    with read(answers) as (headers, snapshots):
        yield _messages(headers, snapshots)


def _messages(
    headers: list[header_pb2.ShardHeader], snapshots: Sequence[Snapshot]
) -> Iterator[tuple[list[Buffer], int]]:
    chunks = chain.from_iterable(values.chunks() for values in snapshots)
    for group in messages(chunks):
        yield encode_values(headers, group), sum(len(chunk.data) for chunk in group)
        headers = []


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
        on_sent: Callable[[int], None] = lambda _: None,
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
