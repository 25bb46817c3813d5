"""One Push stream: receives a gradient whole, checks it whole, and only then lets its shards see it."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from shoal import errors
from shoal._framing import Assembler
from shoal._layout import Aggregation
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.shard import Payload, Shard, Stamp
from shoal_server.shard_events import AnswerPush
from shoal_server.store import ShardStore


@dataclass(frozen=True, slots=True)
class ShardAnswer:
    """What a shard answers to a push."""

    shard: Shard
    answer: AnswerPush


def stamp_of(message: header_pb2.Stamp) -> Stamp:
    """The part of a stamp that names a push within its job."""
    return Stamp(message.worker, message.incarnation, message.step)


def receive(store: ShardStore, stream: Iterator[pb.PushRequest]) -> list[ShardAnswer]:
    """Receives a push, stages it on all its shards, and commits it if its header says so.

    Raises:
        BadChunk: the chunks do not fill the arenas exactly.
        NonFiniteGradient: NaN or Inf in any shard: none of them keeps anything.
        Fenced, StaleEpoch, UnknownJob, UnknownShard, BadRequest: as the store and the shards say.
    """
    first = _first(stream)
    header = first.header
    shards = store.shards(header.stamp.job, header.shards, header.stamp.epoch)
    stamp = stamp_of(header.stamp)
    known = [shard.answer_to(stamp) for shard in shards]
    if all(known):  # a repeat: what it carries is not even read
        return [ShardAnswer(shard, answer) for shard, answer in zip(shards, known, strict=True) if answer]
    if len(header.versions) != len(shards):
        raise errors.BadRequest(
            f"a push to {len(shards)} shards carries {len(header.versions)} versions; send one each"
        )
    if not 0 <= header.weight < math.inf or (header.weight == 0 and first.chunks):
        raise errors.BadRequest(f"a push weighs {header.weight}; it weighs more than 0, or 0 and brings nothing")
    payloads: list[Payload | None] = [None] * len(shards)
    if header.weight > 0:
        payloads = [*_assemble(shards, _aggregations(header), first, stream)]
    answers = [
        shard.stage(stamp, header.weight, version, payload)
        for shard, version, payload in zip(shards, header.versions, payloads, strict=True)
    ]
    if header.commit:
        answers = [shard.commit(stamp) for shard in shards]
    return [ShardAnswer(shard, answer) for shard, answer in zip(shards, answers, strict=True)]


def commit(store: ShardStore, request: pb.CommitRequest) -> list[ShardAnswer]:
    """Commits a push that is staged.

    Raises:
        NotStaged: one of the shards does not hold it.
        Fenced, StaleEpoch, UnknownJob, UnknownShard, BadRequest: as the store and the shards say.
    """
    shards = store.shards(request.stamp.job, request.shards, request.stamp.epoch)
    stamp = stamp_of(request.stamp)
    return [ShardAnswer(shard, shard.commit(stamp)) for shard in shards]


def assign(store: ShardStore, stream: Iterator[pb.PushRequest]) -> list[Shard]:
    """Receives values of all arenas and overwrites the shards' own.

    Raises:
        BadRequest: training has begun.
        BadChunk, NonFiniteGradient, StaleEpoch, UnknownJob, UnknownShard: as for a push.
    """
    first = _first(stream)
    header = first.header
    shards = store.shards(header.stamp.job, header.shards, header.stamp.epoch)
    payloads = [*_assemble(shards, list(Aggregation), first, stream)]
    for shard, payload in zip(shards, payloads, strict=True):
        shard.assign(payload)
    return shards


def _first(stream: Iterator[pb.PushRequest]) -> pb.PushRequest:
    first = next(stream, None)
    if first is None or not first.HasField("header"):
        raise errors.BadRequest("a push begins with a header; this stream has none")
    return first


def _aggregations(header: pb.PushHeader) -> list[Aggregation]:
    try:
        return [Aggregation(code) for code in header.aggregations]
    except ValueError as error:
        raise errors.BadRequest(f"a push names an aggregation that there is not: {error}") from None


def _assemble(
    shards: list[Shard], aggregations: list[Aggregation], first: pb.PushRequest, stream: Iterator[pb.PushRequest]
) -> Iterator[Payload]:
    assemblers = {shard.layout.shard: Assembler(shard.layout, aggregations) for shard in shards}
    message: pb.PushRequest | None = first
    while message is not None:
        for chunk in message.chunks:
            if chunk.shard not in assemblers:
                raise errors.BadChunk(f"a chunk is for shard {chunk.shard}, the push for {sorted(assemblers)}")
            assemblers[chunk.shard].add(chunk)
        message = next(stream, None)
        if message is not None and message.HasField("header"):
            raise errors.BadRequest("a push has one header, in its first message")
    # All of it is checked before any shard sees any of it.
    whole = [(shard, assemblers[shard.layout.shard].finish()) for shard in shards]
    return iter([shard.accept(arenas) for shard, arenas in whole])
