"""One pull: it waits in its shards' memory, and is answered when they let it through.

How a transport sends the answer is not here.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain

from shoal import _tracing, errors
from shoal._wire import Buffer, encode_values, messages
from shoal.v1 import header_pb2
from shoal_server.shards import Shard, Snapshot, Stamp


@dataclass(frozen=True, slots=True)
class PullGrant:
    """A shard lets a pull through: its worker is to take this step next."""

    shard: Shard
    step: int

    def header(self, version: int) -> header_pb2.ShardHeader:
        """What the reply says of the shard, whose values are at this version."""
        return header_pb2.ShardHeader(
            shard=self.shard.layout.shard, generation=self.shard.generation, version=version, step=self.step
        )


@dataclass(eq=False, slots=True)
class _Ticket:
    """The pull's place in one shard."""

    pull: "PendingPull"
    shard: Shard

    def answer(self, step: int) -> None:
        self.pull.answered(PullGrant(self.shard, step))

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
        self._answers: list[PullGrant] = []
        self._error: errors.ShoalError | None = None
        self._unanswered = len(shards)

    def start(self, stamp: Stamp, ahead: int) -> None:
        """Asks all shards; some may answer at once."""
        try:
            for ticket in self._tickets:
                ticket.shard.pull(ticket, stamp, ahead)
        except errors.ShoalError as error:
            self.refused(error)

    def answered(self, answer: PullGrant) -> None:
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

    def take(self) -> list[PullGrant]:
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
def read(answers: Sequence[PullGrant]) -> Iterator[tuple[list[header_pb2.ShardHeader], list[Snapshot]]]:
    """What the reply says of each shard, and the values to send, which stay as they are until `with` ends."""
    with ExitStack() as reading:
        snapshots = [reading.enter_context(answer.shard.read()) for answer in answers]
        yield [answer.header(values.version) for answer, values in zip(answers, snapshots, strict=True)], snapshots


@contextmanager
def replies(answers: Sequence[PullGrant], *, headers_only: bool) -> Iterator[Iterator[tuple[list[Buffer], int]]]:
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
