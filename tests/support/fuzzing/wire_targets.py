"""Fuzz targets of the data plane: chunk messages, frames on a lane, segments, and layouts."""

import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from shoal import consistency, errors, optim
from shoal._transport import PARAMETER_SERVER, Frame, Segment, SegmentUnavailable
from shoal._transport.lane import Lane
from shoal._wire import (
    Aggregation,
    Assembler,
    Chunk,
    Placement,
    ShardLayout,
    decode,
    decode_push,
    encode_push,
    encode_values,
    read_start,
)
from shoal._wire.framing import SlabRange
from shoal._wire.slabs import CallLayout
from shoal.v1 import header_pb2, tensor_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards
from shoal_distribute.coordinator.messages import (
    CallOrder,
    LinkHello,
    decode_index,
    decode_outcome,
    encode_index,
    encode_outcome,
)
from shoal_distribute.coordinator.operation_log import LogPart, OperationEnd, OperationLog
from shoal_distribute.coordinator.outcomes import ScheduledOutcome
from shoal_server.metrics import ServerMetrics
from shoal_server.serving.lane_endpoint import LaneHandler
from shoal_server.serving.service import DataService
from shoal_server.shards import JobShardConfig, ShardStore
from support.fuzzing.campaign import SimpleTarget, Target
from support.fuzzing.messages import Drawer
from support.fuzzing.mutator import mutated

JOB, WORKER = "job", "w"
VARIABLES = {"a": Variable((6, 2)), "b": Variable((3,), dtype="float64"), "n": Variable((2,), "int64", trainable=False)}
WORDS: dict[str, list[Any]] = {
    "job": [JOB],
    "worker": [WORKER],
    "generation": [1],
    "incarnation": [1],
    "step": [0, 1, 2],
    "shards": [0, 1],
    "shard": [0, 1],
    "arena": [0, 1, 2],
    "weight": [1.0],
    "versions": [0, 1],
    "aggregations": [1, 2, 3, 4],
    "variable": ["a", "b", "n"],
    "region": [0, 1],
}


def placement() -> Placement:
    """Returns a small placement: two shards on one server."""
    layouts = plan_shards(VARIABLES, 2, None)
    return Placement(JOB, 1, VARIABLES, assign_shards(layouts, [Candidate("s", "127.0.0.1:1", 0)]))


def job_config(mode: consistency.Consistency, optimizer: optim.Optimizer) -> JobShardConfig:
    """Returns the configuration of the job on its server."""
    return JobShardConfig(name=JOB, generation=1, variables=VARIABLES, optimizer=optimizer, consistency=mode, seed=0)


def store(most_bytes: int = 64 << 20) -> ShardStore:
    """Returns the store of a server that hosts the job, and has admitted the worker.

    Args:
        most_bytes: limit of the bytes of all shards.
    """
    found = ShardStore(most_bytes=most_bytes)
    config = job_config(consistency.Asynchronous(), optim.SGD(0.1))
    found.create(config, [shard.layout for shard in placement().shards])
    found.hosted.groups_of(JOB)[0].admit(WORKER, 1, 0)
    return found


def stamp(step: int = 0) -> header_pb2.Stamp:
    return header_pb2.Stamp(job=JOB, worker=WORKER, incarnation=1, step=step, generation=1)


def call_layout() -> CallLayout:
    return CallLayout([shard.layout for shard in placement().shards])


def push_messages(step: int = 0) -> list[bytes]:
    """Returns the messages of a valid push."""
    layout = call_layout()
    header = pb.PushHeader(
        stamp=stamp(step),
        shards=[shard.shard for shard in layout.shards],
        versions=[0] * len(layout.shards),
        weight=1.0,
        aggregations=[it.value for it in Aggregation],
        commit=True,
    )
    chunks = [Chunk(*slab.keys[0], 0, memoryview(bytes(slab.nbytes))) for slab in layout.slabs]
    return [b"".join(encode_push(header, chunks[:1])), b"".join(encode_push(None, chunks[1:]))]


def _decode_chunks(data: bytes) -> None:
    layout = call_layout_once()
    decode_push(data)
    read_start(pb.PushRequest, memoryview(data)[:4096], len(data))
    read_start(pb.PullReply, memoryview(data)[:4096], len(data))
    runs = {slab: [SlabRange(0, slab.elements, np.empty(slab.elements, slab.dtype))] for slab in layout.slabs}
    assembler = Assembler(layout, runs)
    for chunk in decode(pb.PullReply, data)[1]:
        if len(chunk.data) >= 8 and (memory := assembler.memory(chunk, len(chunk.data))):
            for part in memory:
                part[:] = bytes(len(part))
            assembler.filled(chunk, len(chunk.data))
        else:
            assembler.add(chunk)
    assembler.finish()


_LAYOUT: list[CallLayout] = []


def call_layout_once() -> CallLayout:
    if not _LAYOUT:
        _LAYOUT.append(call_layout())
    return _LAYOUT[0]


def _chunk_seeds() -> list[bytes]:
    chunks = [Chunk(*slab.keys[0], 0, memoryview(bytes(slab.nbytes))) for slab in call_layout().slabs]
    headers = pb.PullReply(headers=[header_pb2.ShardHeader(shard=0, version=3)]).SerializeToString()
    return [b"".join(encode_values(headers, chunks)), b"".join(encode_values(b"", chunks))]


def frame(kind: int, payload: bytes = b"") -> bytes:
    """Returns the bytes of a frame."""
    return bytes([kind, 0, 0, 0]) + len(payload).to_bytes(4, "little") + payload


def lane_conversations() -> list[bytes]:
    """Returns what clients send on a lane after the hello."""
    shards = [0, 1]
    pull = frame(Frame.PULL, pb.PullRequest(stamp=stamp(), shards=shards).SerializeToString())
    begin, rest = push_messages()
    push = frame(Frame.PUSH, begin) + frame(Frame.PUSH, rest) + frame(Frame.END)
    commit = frame(Frame.COMMIT, pb.CommitRequest(stamp=stamp(), shards=shards).SerializeToString())
    return [pull, push, commit, pull + push + commit + pull]


class Lanes:
    """Everything that a client may send on a lane, to the handler of a server with a job."""

    name = "lanes"
    allowed: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        self._service = DataService(store(), ServerMetrics(CollectorRegistry()))
        self._seeds = lane_conversations()
        self._drawer = Drawer(WORDS)
        for seed in self._seeds:  # loads or compiles the kernels, as a server does before it is ready
            with suppress(errors.Unreachable):  # the conversation is over
                self.run(seed)

    def draw(self, draw: random.Random) -> bytes:
        if draw.random() < 0.5:
            return mutated(draw, self._seeds)
        parts = []
        for _ in range(draw.randint(1, 4)):
            kind = draw.choice([*Frame, draw.randrange(256)])
            message = {Frame.PULL: pb.PullRequest, Frame.COMMIT: pb.CommitRequest}.get(kind, pb.PushRequest)
            parts.append(frame(int(kind), self._drawer.encoded(draw, message)))
        return b"".join(parts)

    def run(self, data: bytes) -> None:
        near, far = socket.socketpair()
        with near, far:
            far.sendall(data[:60_000])
            far.shutdown(socket.SHUT_WR)
            handler = LaneHandler(Lane(near, "client", PARAMETER_SERVER, stall_s=5.0), self._service)
            try:
                handler.serve()
            finally:
                handler.close()
                self._check_answers(far)

    def _check_answers(self, far: socket.socket) -> None:
        """Raises the InternalError that a call has got."""
        far.settimeout(0.0)
        answers = bytearray()
        with suppress(OSError):
            while part := far.recv(1 << 16):
                answers += part
        while len(answers) >= 8:
            size = int.from_bytes(answers[4:8], "little")
            if answers[0] == Frame.ERROR:
                detail = header_pb2.ErrorDetail.FromString(bytes(answers[8 : 8 + size]))
                assert detail.code != "INTERNAL", detail.message
            del answers[: 8 + size]

    def stop(self) -> None:
        self._service.store.clear()


class SegmentHeaders:
    """Headers of segments, and the offers that name them."""

    name = "segments"
    allowed: tuple[type[Exception], ...] = (SegmentUnavailable, ValueError)

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._segment = Segment.create(4096, directory=Path(self._folder.name))
        path = Path(self._folder.name) / self._segment.name
        self._header = path.read_bytes()[:64]
        self._file = path.open("r+b", buffering=0)

    def draw(self, draw: random.Random) -> bytes:
        return mutated(draw, [self._header])[:4096]

    def run(self, data: bytes) -> None:
        self._file.seek(0)
        self._file.write(data.ljust(64, b"\0"))
        nonce = self._segment.nonce if len(data) % 2 else data[12:28]
        nbytes = 4096 if len(data) % 3 else int.from_bytes(data[28:36].ljust(8, b"\0"), "little")
        with Segment.open(self._segment.name, nbytes, nonce, directory=Path(self._folder.name)) as opened:
            opened.view(0, nbytes)

    def stop(self) -> None:
        self._file.close()
        self._segment.close()
        self._folder.cleanup()


class Layouts:
    """Placements, as workers get them, and layouts of shards, as servers get them."""

    name = "layouts"
    allowed: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        self._drawer = Drawer(WORDS)
        self._seeds = [placement().encoded]

    def draw(self, draw: random.Random) -> bytes:
        return self._drawer.encoded(draw, tensor_pb2.Placement, self._seeds)

    def run(self, data: bytes) -> None:
        try:
            message = tensor_pb2.Placement.FromString(data)
        except Exception:  # protobuf's own DecodeError
            return
        for shard in message.shards:
            with suppress_refusal():
                ShardLayout.from_proto(shard.layout, VARIABLES)
        Placement.from_proto(message)

    def stop(self) -> None:
        """Nothing to free."""


def _call_seeds() -> list[bytes]:
    """Returns messages between a chief and its workers, each after the number of its decoder."""
    log = OperationLog()
    log.add()
    log.add(OperationEnd.RAISED, 1)
    outcome = b"".join(encode_outcome(3, ScheduledOutcome.of_value({"loss": np.ones(3), "names": ["a", (1, None)]})))
    messages = [
        log.part(0).encode(),
        CallOrder(1, 2, 3, "step").encode(),
        LinkHello(bytes(16), 1, 2, True).encode(),
        encode_index(7),
        outcome,
    ]
    return [bytes([number]) + message for number, message in enumerate(messages)]


def _decode_call(data: bytes) -> None:
    decoders = (LogPart.decode, CallOrder.decode, LinkHello.decode, decode_index, decode_outcome)
    found = decoders[data[0] % len(decoders)](data[1:]) if data else None
    if isinstance(found, tuple):
        found[1].value()


def suppress_refusal() -> suppress:
    return suppress(errors.ShoalError)


def targets() -> list[Target]:
    """Returns the targets of this module."""
    chunks = SimpleTarget("chunks", lambda: [*_chunk_seeds(), *_chunk_seeds()], _decode_chunks)
    calls = SimpleTarget("scheduled_calls", _call_seeds, _decode_call)
    return [chunks, Lanes(), SegmentHeaders(), Layouts(), calls]
