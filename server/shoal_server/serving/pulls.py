"""Pending pull: a pull that its shards have not answered yet. No thread waits for it. Transports send the answers."""

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
    """A shard's permission for a pull, with the next step of its worker."""

    shard: Shard
    step: int

    def header(self, version: int) -> header_pb2.ShardHeader:
        """Returns the shard's header in the reply, for values of this version."""
        return header_pb2.ShardHeader(
            shard=self.shard.layout.shard, generation=self.shard.generation, version=version, step=self.step
        )


@dataclass(eq=False, slots=True)
class _Ticket:
    """The pull's ticket at one shard."""

    pull: "PendingPull"
    shard: Shard

    def answer(self, step: int) -> None:
        self.pull.answered(PullGrant(self.shard, step))

    def refuse(self, error: errors.ShoalError) -> None:
        self.pull.refused(error)


class PendingPull:
    """A pull's tickets at its shards, and the grants so far. It holds no thread.

    Args:
        shards: the shards to ask.
        wake: called when there is something to `take`, from any thread and without any shard's lock.
        span: tracing span of the call; the sender of the answers ends it.
    """

    def __init__(
        self, shards: Sequence[Shard], wake: Callable[[], None], span: _tracing.Span = _tracing.NOTHING
    ) -> None:
        self._tickets = [_Ticket(self, shard) for shard in shards]
        self._wake = wake
        self._waiting = span.child("wait")
        self._lock = threading.Lock()  # guards what follows; never held together with a shard's lock
        self._grants: list[PullGrant] = []
        self._error: errors.ShoalError | None = None
        self._unanswered = len(shards)

    def start(self, stamp: Stamp, ahead: int) -> None:
        """Asks all shards; some may answer at once.

        Args:
            stamp: worker, incarnation and step.
            ahead: steps after the stamp's step for which the values are wanted.
        """
        try:
            for ticket in self._tickets:
                ticket.shard.pull(ticket, stamp, ahead)
        except errors.ShoalError as error:
            self.refused(error)

    def answered(self, answer: PullGrant) -> None:
        """Records a shard's grant."""
        with self._lock:
            self._grants.append(answer)
            self._unanswered -= 1
            answered = not self._unanswered
        if answered:
            self._waiting.end()
        self._wake()

    def refused(self, error: errors.ShoalError) -> None:
        """Records that the pull has failed."""
        with self._lock:
            self._error = self._error or error
        self._waiting.end(error)
        self._wake()

    def take(self) -> list[PullGrant]:
        """Returns the grants since the last call.

        Raises:
            ShoalError: the pull was refused with this error.
        """
        with self._lock:
            if self._error:
                raise self._error
            grants, self._grants = self._grants, []
            return grants

    @property
    def waits(self) -> bool:
        """Whether a shard has not answered yet."""
        with self._lock:
            return self._unanswered > 0

    def abandon(self) -> None:
        """Withdraws its tickets: the answer is no longer needed."""
        self._waiting.end()
        for ticket in self._tickets:
            ticket.shard.abandon(ticket)


@contextmanager
def read(grants: Sequence[PullGrant]) -> Iterator[tuple[list[header_pb2.ShardHeader], list[Snapshot]]]:
    """Yields each shard's header and snapshot; the values stay as they are until `with` ends."""
    with ExitStack() as reading:
        snapshots = [reading.enter_context(grant.shard.read()) for grant in grants]
        yield [grant.header(values.version) for grant, values in zip(grants, snapshots, strict=True)], snapshots


@contextmanager
def replies(grants: Sequence[PullGrant], *, headers_only: bool) -> Iterator[Iterator[tuple[list[Buffer], int]]]:
    """Yields the messages that answer a pull: for each, its pieces and the bytes of its chunks.

    They are valid until `with` ends, because they share the shards' memory.

    Args:
        grants: the shards to send.
        headers_only: whether to send no values.
    """
    if headers_only:
        headers = [grant.header(grant.shard.version) for grant in grants]
        yield iter([(encode_values(headers, []), 0)])
        return
    with read(grants) as (headers, snapshots):
        yield _messages(headers, snapshots)


def _messages(
    headers: list[header_pb2.ShardHeader], snapshots: Sequence[Snapshot]
) -> Iterator[tuple[list[Buffer], int]]:
    chunks = chain.from_iterable(values.chunks() for values in snapshots)
    for group in messages(chunks):
        yield encode_values(headers, group), sum(len(chunk.data) for chunk in group)
        headers = []
