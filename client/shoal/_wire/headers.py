"""Encoding of the answers for many shards: the headers of a pull's reply, and the reply to a push.

The answers of one call differ only in the numbers of the shards. So the encoding is prepared for each shard, and a call
adds what all shards share. The bytes are those that the generated classes write.
"""

from collections.abc import Sequence

from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

# Tag of the first field of PullReply, PushReply and ShardPush, each of them a message.
_FIRST = b"\x0a"


class ShardHeaders:
    """Encodes the answers of some shards of one generation.

    Args:
        shards: numbers of the shards, in the order of the request.
        generation: generation of the shards.
    """

    def __init__(self, shards: Sequence[int], generation: int) -> None:
        self._starts = [
            header_pb2.ShardHeader(shard=shard, generation=generation).SerializeToString() for shard in shards
        ]
        # By the number of bytes that follow. Any thread may add one; they are few, because numbers take 1 to 10 bytes.
        self._pulled: dict[int, list[bytes]] = {}
        self._pushed: dict[tuple[int, int], list[bytes]] = {}

    def of_values(self, version: int, step: int) -> bytes:
        """Returns a `PullReply` that has only the headers.

        Args:
            version: updates applied.
            step: the worker's next step.
        """
        state = header_pb2.ShardHeader(version=version, step=step).SerializeToString()
        size = len(state)
        starts = self._pulled.get(size)
        if starts is None:
            starts = self._pulled[size] = [_sized(len(start) + size) + start for start in self._starts]
        return state.join(starts) + state

    def of_push(self, version: int, step: int, outcome: "pb.PushOutcome.ValueType", staleness: int) -> bytes:
        """Returns a `PushReply`.

        Args:
            version: updates applied.
            step: the worker's next step.
            outcome: outcome of the push.
            staleness: versions applied between the gradient's pull and its push.
        """
        state = header_pb2.ShardHeader(version=version, step=step).SerializeToString()
        rest = pb.ShardPush(outcome=outcome, staleness=staleness).SerializeToString()
        sizes = len(state), len(rest)
        starts = self._pushed.get(sizes)
        if starts is None:
            starts = self._pushed[sizes] = [_push_start(start, *sizes) for start in self._starts]
        answer = state + rest
        return answer.join(starts) + answer


def _push_start(start: bytes, state: int, rest: int) -> bytes:
    header = _sized(len(start) + state) + start
    return _sized(len(header) + state + rest) + header


def _sized(nbytes: int) -> bytes:
    """Returns the tag and the length of a message of `nbytes` bytes, at most a few dozen."""
    assert nbytes < 0x80, "a length of one byte"
    return _FIRST + bytes([nbytes])


__all__ = ["ShardHeaders"]
