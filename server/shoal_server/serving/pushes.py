"""Push handling: receives and checks a complete gradient before its shards see any of it."""

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shoal import _tracing, errors
from shoal._memory.buffers import BufferPool
from shoal._wire import (
    Aggregation,
    ArenaKey,
    ArenaRange,
    Assembler,
    Chunk,
    Cursor,
    arenas_of,
    region_arrays,
    region_offsets,
    storage_dtype,
)
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.optimizers import conversions, kernels
from shoal_server.shards import AnswerPush, Payload, Shard, ShardStore, Stamp


@dataclass(frozen=True, slots=True)
class ShardPushResult:
    """A shard's answer to a push."""

    shard: Shard
    answer: AnswerPush


_OUTCOMES = {
    "staged": pb.STAGED,
    "accepted": pb.ACCEPTED,
    "dropped_late": pb.DROPPED_LATE,
    "skipped": pb.SKIPPED,
}

# Receives the arenas of some aggregations of some shards; returns a payload for each shard.
Source = Callable[[Sequence[Shard], Collection[Aggregation], BufferPool], list[Payload]]


def stamp_of(message: header_pb2.Stamp) -> Stamp:
    """Returns the part of a stamp that names a push within its job."""
    return Stamp(message.worker, message.incarnation, message.step)


def receive(store: ShardStore, header: pb.PushHeader, source: Source) -> list[ShardPushResult]:
    """Receives a push, stages it on all its shards, and commits it if its header says so.

    Args:
        store: the shards.
        header: header of the push.
        source: receives the payload.

    Returns:
        Each shard's answer, in the header's order.

    Raises:
        BadChunk: the chunks do not fill the arenas exactly.
        NonFiniteGradient: a shard's gradient holds NaN or Inf; no shard keeps any of the push.
        Fenced, StaleGeneration, UnknownJob, UnknownShard, BadRequest: from the store and the shards.
    """
    with _tracing.server_span("Push", header.stamp):
        return _received(store, header, source)


def _received(store: ShardStore, header: pb.PushHeader, source: Source) -> list[ShardPushResult]:
    shards = store.shards(header.stamp.job, header.shards, header.stamp.generation)
    stamp = stamp_of(header.stamp)
    known = [shard.answer_to(stamp) for shard in shards]
    if all(known):  # a repeated push: its payload is not read
        return [ShardPushResult(shard, answer) for shard, answer in zip(shards, known, strict=True) if answer]
    if len(header.versions) != len(shards):
        raise errors.BadRequest(
            f"a push to {len(shards)} shards carries {len(header.versions)} versions; send one for each shard"
        )
    if not 0 <= header.weight < math.inf:
        raise errors.BadRequest(f"the weight of a push is {header.weight}; it must be finite and at least 0")
    payloads: Sequence[Payload | None] = [None] * len(shards)
    if header.weight > 0:
        with _tracing.span("assemble"):
            payloads = source(shards, _aggregations(header), store.memory)
    cursor = Cursor.from_proto(header.cursor) if header.HasField("cursor") else None
    answers = [
        shard.stage(stamp, header.weight, version, payload, cursor)
        for shard, version, payload in zip(shards, header.versions, payloads, strict=True)
    ]
    if header.commit:
        with store.commit_gate(header.stamp.job).passing():
            answers = [shard.commit(stamp) for shard in shards]
    return [ShardPushResult(shard, answer) for shard, answer in zip(shards, answers, strict=True)]


def commit(store: ShardStore, request: pb.CommitRequest) -> list[ShardPushResult]:
    """Commits a staged push.

    Raises:
        NotStaged: one of the shards does not hold it.
        Fenced, StaleGeneration, UnknownJob, UnknownShard, BadRequest: from the store and the shards.
    """
    shards = store.shards(request.stamp.job, request.shards, request.stamp.generation)
    stamp = stamp_of(request.stamp)
    with _tracing.server_span("Commit", request.stamp), store.commit_gate(request.stamp.job).passing():
        return [ShardPushResult(shard, shard.commit(stamp)) for shard in shards]


def reply_of(answers: Sequence[ShardPushResult], on_answer: Callable[[AnswerPush], None]) -> pb.PushReply:
    """Returns the message that answers a push or a commit.

    Args:
        answers: answers of the shards.
        on_answer: called with each answer.
    """
    reply = pb.PushReply()
    for answered in answers:
        answer, shard = answered.answer, answered.shard
        header = header_pb2.ShardHeader(
            shard=shard.layout.shard, generation=shard.generation, version=answer.version, step=answer.step
        )
        reply.shards.add(header=header, outcome=_OUTCOMES[answer.outcome], staleness=answer.staleness)
        on_answer(answer)
    return reply


def assign(store: ShardStore, header: pb.PushHeader, source: Source) -> list[Shard]:
    """Receives values of all arenas and overwrites those of the shards.

    Args:
        store: the shards.
        header: names the shards.
        source: receives the values.

    Returns:
        The shards.

    Raises:
        BadRequest: training has begun.
        BadChunk, NonFiniteGradient, StaleGeneration, UnknownJob, UnknownShard: as for a push.
    """
    shards = store.shards(header.stamp.job, header.shards, header.stamp.generation)
    payloads = source(shards, list(Aggregation), store.memory)
    for shard, payload in zip(shards, payloads, strict=True):
        shard.assign(payload)
    return shards


def from_chunks(
    first: Sequence[Chunk],
    rest: Callable[[Assembler], Iterable[tuple[pb.PushRequest, int]]],
    on_received: Callable[[int], object],
) -> Source:
    """Returns a source that receives chunks.

    Args:
        first: chunks of the first message.
        rest: feeds the chunks of the other messages to an assembler; yields each message without them, and their bytes.
        on_received: called with the bytes of each message's chunks.
    """

    def source(shards: Sequence[Shard], aggregations: Collection[Aggregation], memory: BufferPool) -> list[Payload]:
        staged = _Staged(shards, aggregations, memory)
        runs = {key: [ArenaRange(0, array.size, array)] for key, array in staged.arrays.items()}
        assembler = Assembler(staged.arenas, runs, conversions.receive, kernels.all_finite)
        for chunk in first:
            assembler.add(chunk)
        on_received(sum(len(chunk.data) for chunk in first))
        for message, size in rest(assembler):
            on_received(size)
            if message.HasField("header"):
                raise errors.BadRequest("a push has more than one header; only its first message may have one")
        assembler.finish()
        for key in assembler.non_finite:
            raise staged.non_finite(key)
        return staged.payloads()

    return source


def from_region(region: np.ndarray, on_received: Callable[[int], object] = lambda _: None) -> Source:
    """Returns a source that reads a region of shared memory.

    The source copies the region before it checks it, because the client may write to it at any time.

    Args:
        region: the region's bytes, as uint8.
        on_received: called with the number of bytes taken.
    """

    def source(shards: Sequence[Shard], aggregations: Collection[Aggregation], memory: BufferPool) -> list[Payload]:
        layouts = [shard.layout for shard in shards]
        _, end = region_offsets(layouts)
        if end > region.size:
            raise errors.BadRequest(f"a push of {end} bytes does not fit into a region of {region.size} bytes")
        staged = _Staged(shards, aggregations, memory)
        on_received(sum(arena.nbytes for arena in staged.arenas.values()))
        arrived = region_arrays(region, layouts, aggregations)
        bad = conversions.receive_all([(staged.arrays[key], elements) for key, elements in arrived.items()])
        if bad is not None:
            raise staged.non_finite([*arrived][bad])
        return staged.payloads()

    return source


class _Staged:
    """Memory for the payload of a push, by arena."""

    def __init__(self, shards: Sequence[Shard], aggregations: Collection[Aggregation], memory: BufferPool) -> None:
        self._shards = {shard.layout.shard: shard for shard in shards}
        self.arenas = arenas_of([shard.layout for shard in shards], aggregations)
        self.arrays: dict[ArenaKey, np.ndarray] = {}
        for key, arena in self.arenas.items():
            dtype = storage_dtype(arena.dtype)
            self.arrays[key] = memory.take(arena.elements * dtype.itemsize).view(dtype)

    def payloads(self) -> list[Payload]:
        """Returns the payload of each shard."""
        payloads: dict[int, dict[int, np.ndarray]] = {number: {} for number in self._shards}
        for (number, index), array in self.arrays.items():
            payloads[number][index] = array
        return [*payloads.values()]

    def non_finite(self, key: ArenaKey) -> errors.NonFiniteGradient:
        array = self.arrays[key]
        element = int(np.flatnonzero(~np.isfinite(array))[0])
        return self._shards[key[0]].non_finite(key[1], element, array[element])


def _aggregations(header: pb.PushHeader) -> list[Aggregation]:
    try:
        return [Aggregation(code) for code in header.aggregations]
    except ValueError as error:
        raise errors.BadRequest(f"a push names an unknown aggregation: {error}") from None
