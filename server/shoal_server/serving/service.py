"""Data service: the data-plane calls on one server's shards, independent of the transport."""

from collections.abc import Callable, Sequence

from shoal import errors
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.metrics import ServerMetrics
from shoal_server.serving import pushes
from shoal_server.shards import Shard, ShardStore

# Called with a number of bytes.
Counted = Callable[[int], object]


class DataService:
    """Carries out pulls, pushes, commits and assignments for every endpoint.

    `shoal_server.serving.pulls.PendingPull` waits for a pull, on the shards that `shards_of` returns.

    Args:
        store: the shards.
        metrics: the server's metrics.
    """

    def __init__(self, store: ShardStore, metrics: ServerMetrics) -> None:
        self.store, self.metrics = store, metrics

    def shards_of(self, request: pb.PullRequest) -> list[Shard]:
        """Returns the shards of a pull, and counts the pull.

        Raises:
            StaleGeneration, UnknownJob, UnknownShard: from the store.
        """
        self.metrics.pulls.inc()
        return self.store.shards(request.stamp.job, request.shards, request.stamp.generation)

    def push(self, read: Callable[[], tuple[pb.PushHeader, pushes.Source]]) -> pb.PushReply:
        """Receives a push: stages it, and commits it if its header says so.

        Args:
            read: returns the header and the source of the payload.

        Raises:
            ShoalError: see `pushes.receive`.
        """
        with self.metrics.pushing("push"):
            header, source = read()
            answers = pushes.receive(self.store, header, source)
        return self._reply(answers)

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        """Commits a staged push.

        Raises:
            ShoalError: see `pushes.commit`.
        """
        with self.metrics.pushing("commit"):
            answers = pushes.commit(self.store, request)
        return self._reply(answers)

    def assign(self, header: pb.PushHeader, source: pushes.Source) -> pb.PushReply:
        """Overwrites values.

        Raises:
            ShoalError: see `pushes.assign`.
        """
        shards = pushes.assign(self.store, header, source)
        headers = [header_pb2.ShardHeader(shard=shard.layout.shard, generation=shard.generation) for shard in shards]
        return pb.PushReply(shards=[pb.ShardPush(header=header) for header in headers])

    def sent(self, transport: str) -> Counted:
        """Returns the function that counts bytes of values that a transport sends.

        Args:
            transport: the name under which it is registered.
        """
        return self.metrics.sent[transport]

    def received(self, transport: str) -> Counted:
        """Returns the function that counts bytes of gradients and values that a transport receives; see `sent`."""
        return self.metrics.received[transport]

    def _reply(self, answers: Sequence[pushes.ShardPushResult]) -> pb.PushReply:
        return pushes.reply_of(answers, self.metrics.answered)


def required(header: pb.PushHeader | None) -> pb.PushHeader:
    """Returns the header of a push's first message.

    Raises:
        BadRequest: the message has no header.
    """
    if header is None:
        raise errors.BadRequest("the first message of a push has no header")
    return header


__all__ = ["DataService", "required"]
