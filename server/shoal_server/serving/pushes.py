"""Push handling: receives and checks a complete gradient before its shards see any of it."""

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np

from shoal import _tracing, errors
from shoal._memory.buffers import BufferPool
from shoal._wire import Aggregation, Assembler, Chunk, Cursor, Slab, SlabArrays, SlabRange, storage_dtype
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.optimizers import conversions, kernels
from shoal_server.serving.pending_push import PendingPush
from shoal_server.shards import AnswerPush, LockGroup, Payload, Selection, ShardStore

_OUTCOMES = {
    "staged": pb.STAGED,
    "accepted": pb.ACCEPTED,
    "dropped_late": pb.DROPPED_LATE,
    "skipped": pb.SKIPPED,
}

# Receives the slabs of some aggregations of some shards; returns them by slab of the call.
PushSource = Callable[[Selection, Collection[Aggregation], BufferPool], SlabArrays]


def receive(push: PendingPush, source: PushSource) -> Payload | None:
    """Receives the gradient of a push that does not wait any longer.

    Args:
        push: the push.
        source: receives the payload.

    Returns:
        The gradient by slab of the group; None if the weight is 0.

    Raises:
        BadChunk: the chunks do not fill the slabs exactly.
        NonFiniteGradient: a gradient holds NaN or Inf; no shard keeps any of the push.
        Cancelled: the push was repeated while it waited.
    """
    header = push.header
    try:
        if header.weight <= 0:
            return None
        if not push.wanted:
            return {}
        with _tracing.span("assemble"):
            return push.shards.payload(source(push.shards, _aggregations(header), push.memory), push.memory)
    except BaseException:
        push.withdraw()
        raise


def stage(push: PendingPush, payload: Payload | None, check: Callable[[], object]) -> AnswerPush:
    """Stages a push on all its shards.

    Args:
        push: the push.
        payload: what `receive` returned.
        check: raises an error if the caller may not push any longer.

    Returns:
        The answer of the shards. It may have to wait for the backup.

    Raises:
        Fenced, UnknownJob, BadRequest: from the group.
    """
    header, group = push.header, push.group
    try:
        cursor = Cursor.from_proto(header.cursor) if header.HasField("cursor") else None
        # The versions differ only if the values came from several servers, at an earlier placement: the oldest counts.
        check()
        squares = header.squares if header.HasField("squares") else None
        rate = header.learning_rate if header.HasField("learning_rate") else None
        version = min(header.versions)
        return group.stage(push.stamp, header.weight, version, payload, cursor, squares, rate)
    except BaseException:
        drop(push, payload)
        raise


def drop(push: PendingPush, payload: Payload | None) -> None:
    """Ends a push that was received and is not staged."""
    push.withdraw()
    if payload is not None:
        push.group.drop_gradient(payload)


def find(store: ShardStore, request: pb.CommitRequest) -> tuple[LockGroup, Selection]:
    """Returns the group of a commit, and the shards in the request's order.

    Raises:
        StaleGeneration, UnknownJob, UnknownShard, BadRequest: from the store and the group.
    """
    group = store.hosted.group(request.stamp.job, request.stamp.generation, request.shards)
    shards = group.select(request.shards)
    shards.check_whole("commit", group.term)
    return group, shards


def reply_of(shards: Selection, answer: AnswerPush) -> bytes:
    """Returns the encoded `PushReply` to a push or a commit.

    Args:
        shards: the shards of the push.
        answer: their answer.
    """
    return shards.headers.of_push(answer.version, answer.step, _OUTCOMES[answer.outcome], answer.staleness)


def assign(store: ShardStore, header: pb.PushHeader, source: PushSource, check: Callable[[], object]) -> Selection:
    """Receives values of all variables, or one of their slots, and overwrites those of the shards.

    Args:
        store: the shards.
        header: names the shards.
        source: receives the values.
        check: raises an error if the caller may not assign any longer. It is called when the values have arrived.

    Returns:
        The shards.

    Raises:
        BadRequest: training has begun; or there is no such slot, or it cannot have these values.
        NonFiniteGradient: the values contain NaN or Inf; nothing was assigned.
        BadChunk, StaleGeneration, UnknownJob, UnknownShard: as for a push.
    """
    group = store.hosted.group(header.stamp.job, header.stamp.generation, header.shards)
    shards, slot = group.select(header.shards, header.slot), header.slot
    try:
        values = source(shards, [Aggregation.TRAINABLE] if slot else list(Aggregation), store.memory)
    except errors.NonFiniteGradient as error:
        name, value = error.details["variable"], error.details["value"]
        raise errors.NonFiniteGradient(
            f"the initial {slot or 'values'} of {name!r} contain {value}; no variable of job {header.stamp.job} has "
            "initial values. Give finite values",
            **error.details,
        ) from None
    least = next((it.least for it in group.config.optimizer.possible_slots if it.name == slot), -math.inf)
    if any(array.min() < least for array in values.values()):
        raise errors.BadRequest(f"the initial {slot} of job {header.stamp.job} has a value below {least:g}; correct it")
    check()
    group.assign(shards, values, header.updates, slot)
    return shards


def from_chunks(
    first: Sequence[Chunk],
    rest: Callable[[Assembler], Iterable[tuple[pb.PushRequest, int]]],
    on_received: Callable[[int], object],
) -> PushSource:
    """Returns a source that receives chunks.

    Args:
        first: chunks of the first message.
        rest: feeds the chunks of the other messages to an assembler; yields each message without its chunks, and
            the number of their bytes.
        on_received: called with the bytes of each message's chunks.

    Raises:
        BadRequest: from the source, if a message after the first one has a header.
    """

    def source(shards: Selection, aggregations: Collection[Aggregation], memory: BufferPool) -> SlabArrays:
        arrays = _allocated(shards, aggregations, memory)
        runs = {slab: [SlabRange(0, array.size, array)] for slab, array in arrays.items()}
        assembler = Assembler(shards.layout, runs, conversions.receive, kernels.all_finite)
        for chunk in first:
            assembler.add(chunk)
        on_received(sum(len(chunk.data) for chunk in first))
        for message, size in rest(assembler):
            on_received(size)
            if message.HasField("header"):
                raise errors.BadRequest("a push has more than one header; only its first message may have one")
        assembler.finish()
        for slab in assembler.non_finite:
            raise _non_finite(shards, slab, arrays[slab])
        return arrays

    return source


def from_region(region: np.ndarray, on_received: Callable[[int], object] = lambda _: None) -> PushSource:
    """Returns a source that reads a region of shared memory.

    The source copies the region before it checks it, because the client may write to it at any time.

    Args:
        region: the region's bytes, as uint8.
        on_received: called with the number of bytes taken.
    """

    def source(shards: Selection, aggregations: Collection[Aggregation], memory: BufferPool) -> SlabArrays:
        if shards.layout.region_bytes > region.size:
            raise errors.BadRequest(
                f"a push of {shards.layout.region_bytes} bytes does not fit into a region of {region.size} bytes"
            )
        arrays = _allocated(shards, aggregations, memory)
        on_received(sum(slab.nbytes for slab in arrays))
        arrived = shards.layout.arrays(region, aggregations)
        bad = conversions.receive_all([(arrays[slab], elements) for slab, elements in arrived.items()])
        if bad is not None:
            slab = [*arrived][bad]
            raise _non_finite(shards, slab, arrays[slab])
        return arrays

    return source


def _allocated(shards: Selection, aggregations: Collection[Aggregation], memory: BufferPool) -> SlabArrays:
    arrays: SlabArrays = {}
    for slab in shards.layout.carrying(aggregations):
        dtype = storage_dtype(slab.dtype)
        arrays[slab] = memory.take(slab.elements * dtype.itemsize).view(dtype)
    return arrays


def _non_finite(shards: Selection, slab: Slab, array: np.ndarray) -> errors.NonFiniteGradient:
    element = int(np.flatnonzero(~np.isfinite(array))[0])
    place = bisect_right(slab.starts, element) - 1
    number, index = slab.keys[place]
    (shard,) = (shard for shard in shards.shards if shard.layout.shard == number)
    return shard.non_finite(index, element - slab.starts[place], array[element])


def _aggregations(header: pb.PushHeader) -> list[Aggregation]:
    try:
        return [Aggregation(code) for code in header.aggregations]
    except ValueError as error:
        raise errors.BadRequest(f"a push names an unknown aggregation: {error}") from None
