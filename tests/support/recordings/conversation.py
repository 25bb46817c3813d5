"""Recordings of the wire: how calls and frames are kept in files and compared.

A conversation is what passes between clients and servers, in order, as bytes: gRPC messages, statuses, error details,
and the frames of lanes. `recorder` records it between real clients and real servers. `playback` plays one recorded
side against a real other side.

Bytes are compared as they are, except in messages that differ from run to run:

- `STAND_INS` lists the fields that hold an address, a secret or a version of the process. The recording has a fixed
  value in place of each. During playback, the value of the current process replaces the fixed value. So the test still
  checks that the field holds the right value.
- `CLEARED` lists the fields that hold a time which the tests cannot set. These fields are left empty.
- Protobuf does not fix the order of a map's entries. A message type that can hold a map is decoded and encoded again
  with its entries in order. Unknown fields stay, so a field whose number has changed is still found.

`rewritten` does all three. It does not change the bytes of other message types.
"""

import base64
import functools
import hashlib
import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shoal.v1 import coordinator_pb2, header_pb2, job_pb2
from shoal.v1 import parameter_server_pb2 as pb

FOLDER = Path(__file__).parents[2] / "golden" / "wire"
CHECKPOINT = FOLDER / "checkpoint"
STAND_INS = {
    "shoal.v1.ShardPlacement.address",
    "shoal.v1.RegisterRequest.address",
    "shoal.v1.Member.address",
    "shoal.v1.AttachReply.address",
    "shoal.v1.AttachReply.token",
    "shoal.v1.AttachReply.host",
    "shoal.v1.LaneHello.token",
    "shoal.v1.Segment.name",
    "shoal.v1.Segment.nonce",
    "shoal.v1.RegisterRequest.version",
}

# Of a checkpoint: `time.time()` at the cut, and what has passed since. A status has the former as well.
CLEARED = {"shoal.v1.Checkpoint.time", "shoal.v1.CheckpointEnd.seconds"}

# A frame's header: kind, three zero bytes, length. It and the kinds are as in the proto's table, not as in a module.
HEADER = struct.Struct("<B3sI")
HELLO, WELCOME, PULL, VALUES, PUSH, COMMIT, PUSHED, ERROR, END = range(1, 10)
_LANE_KINDS = {HELLO: pb.LaneHello.DESCRIPTOR, ERROR: header_pb2.ErrorDetail.DESCRIPTOR}

# What the coordinator asks of servers; the other calls of that service are its clients'.
COORDINATORS = {
    f"/shoal.v1.ParameterServer/{name}"
    for name in (
        *("CreateShards", "DropShards", "AdmitWorkers", "FenceWorkers", "ReleaseWorkers"),
        *("HoldCommits", "ResumeCommits", "Save", "CollectFiles", "Restore"),
    )
}
METHODS = {
    f"/{service.full_name}/{method.name}": method
    for file in (pb.DESCRIPTOR, job_pb2.DESCRIPTOR, coordinator_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}
Side = Literal["client", "server"]
Names = Mapping[str | bytes, str | bytes]


@dataclass(frozen=True)
class Call:
    """A gRPC call, with its messages as bytes.

    Attributes:
        to: the called role: "coordinator", "server-0" and so on.
        method: as on the wire.
        requests, replies: the messages of each direction.
        status, details: how the call ended.
        error: the trailing metadata that carries an `ErrorDetail`; empty: there was none.
    """

    to: str
    method: str
    requests: tuple[bytes, ...]
    replies: tuple[bytes, ...] = ()
    status: str = "OK"
    details: str = ""
    error: bytes = b""

    @property
    def by_coordinator(self) -> bool:
        """Whether the coordinator makes this call by itself."""
        return self.method in COORDINATORS

    def rewritten(self, names: Names) -> "Call":
        """Returns the same call in its comparable form."""
        method = METHODS[self.method]
        return Call(
            self.to,
            self.method,
            tuple(rewritten(method.input_type, message, names) for message in self.requests),
            tuple(rewritten(method.output_type, message, names) for message in self.replies),
            self.status,
            self.details,
            rewritten(header_pb2.ErrorDetail.DESCRIPTOR, self.error, names),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "to": self.to,
            "method": self.method,
            "requests": [_text(message) for message in self.requests],
            "replies": [_text(message) for message in self.replies],
            "status": self.status,
            "details": self.details,
            "error": _text(self.error),
        }


@dataclass(frozen=True)
class LaneTurn:
    """The frames that one side of a lane sends until the other side sends one.

    Attributes:
        lane: "server-0/1" is the second lane to this server, in the order in which they were opened.
        side: the side that sends.
        data: the frames.
        slot: the slot of shared memory that the call uses, from 1; 0: none.
        memory: the contents of that slot: before the answer to a push, after the answer to a pull.
    """

    lane: str
    side: Side
    data: bytes
    slot: int = 0
    memory: bytes = b""

    @property
    def to(self) -> str:
        """The name of the server."""
        return self.lane.partition("/")[0]

    @property
    def by_coordinator(self) -> bool:
        """Always false: the coordinator uses no lanes."""
        return False

    def rewritten(self, names: Names) -> "LaneTurn":
        """Returns the same turn in its comparable form."""
        pieces = []
        for kind, data in frames(self.data):
            known = _LANE_KINDS.get(kind)
            payload = rewritten(known, data, names) if known else data
            pieces.append(HEADER.pack(kind, bytes(3), len(payload)) + payload)
        return LaneTurn(self.lane, self.side, b"".join(pieces), self.slot, self.memory)

    def to_json(self) -> dict[str, Any]:
        record = {"lane": self.lane, "side": self.side, "data": _text(self.data)}
        return record | ({"slot": self.slot, "memory": _text(zlib.compress(self.memory, 9))} if self.slot else {})


@dataclass(frozen=True)
class Advance:
    """An advance of the coordinator's clock, in seconds."""

    seconds: float
    to = ""
    by_coordinator = False

    def to_json(self) -> dict[str, Any]:
        return {"advance": self.seconds}


Entry = Call | LaneTurn | Advance


def rewritten(kind: Descriptor, data: bytes, names: Names) -> bytes:
    """Returns a message in its comparable form, as described above. Other messages are returned unchanged."""
    if not data or not _is_unstable(kind):
        return data
    message = GetMessageClass(kind).FromString(data)
    _rewrite(message, names)
    return message.SerializeToString(deterministic=True)


@functools.cache
def _is_unstable(kind: Descriptor) -> bool:
    """Whether a message of this type can hold a map, or a field that is rewritten."""
    seen: set[str] = set()

    def found(descriptor: Descriptor) -> bool:
        if descriptor.full_name in seen:
            return False
        seen.add(descriptor.full_name)
        if descriptor.GetOptions().map_entry:
            return True
        own = {it.full_name for it in descriptor.fields}
        inner = [it.message_type for it in descriptor.fields if it.message_type]
        return bool(own & (STAND_INS | CLEARED)) or any(map(found, inner))

    return found(kind)


def _rewrite(message: Message, names: Names) -> None:
    for descriptor, value in message.ListFields():
        if descriptor.full_name in CLEARED:
            message.ClearField(descriptor.name)
        elif descriptor.full_name in STAND_INS:
            setattr(message, descriptor.name, names.get(value, value))
        elif descriptor.message_type and not descriptor.message_type.GetOptions().map_entry:
            for inner in value if descriptor.is_repeated else (value,):
                _rewrite(inner, names)


def token_of(server: str) -> bytes:
    """Returns the stand-in for the token of a server's lanes."""
    return hashlib.sha256(server.encode()).digest()


def frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the frames in the bytes of a lane: kind and payload."""
    while data:
        kind, reserved, size = HEADER.unpack_from(data)
        assert reserved == bytes(3)
        assert len(data) >= HEADER.size + size, "a turn ends within a frame"
        yield kind, data[HEADER.size : HEADER.size + size]
        data = data[HEADER.size + size :]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def write(path: Path, entries: Sequence[Entry]) -> None:
    """Writes a conversation: one JSON object a line, with bytes in base64. Memory is first compressed by zlib."""
    path.write_text("".join(json.dumps(entry.to_json()) + "\n" for entry in entries))


def load(path: Path) -> list[Entry]:
    """Reads a conversation that `write` has written."""
    return [_entry(json.loads(line)) for line in path.read_text().splitlines()]


def _entry(record: dict[str, Any]) -> Entry:
    if "advance" in record:
        return Advance(record["advance"])
    decode = base64.b64decode
    if "lane" in record:
        memory = zlib.decompress(decode(record["memory"])) if "memory" in record else b""
        return LaneTurn(record["lane"], record["side"], decode(record["data"]), record.get("slot", 0), memory)
    messages = {name: tuple(map(decode, record[name])) for name in ("requests", "replies")}
    return Call(**record | messages | {"error": decode(record["error"])})


def shown(entry: Entry) -> str:
    """Returns an entry as text for people, in messages of failed tests."""
    match entry:
        case Call():
            method = METHODS[entry.method]
            said = [str(GetMessageClass(method.input_type).FromString(it)) for it in entry.requests]
            answered = [str(GetMessageClass(method.output_type).FromString(it)) for it in entry.replies]
            raw = hashlib.sha256(b"".join((*entry.requests, *entry.replies))).hexdigest()[:16]
            end = f"{entry.status} {entry.details} error={entry.error!r} sha256={raw}"
            return "\n".join([f"{entry.method} to {entry.to}", *said, "->", *answered, end])
        case LaneTurn():
            return f"lane {entry.lane}, {entry.side}: {[(kind, data[:200]) for kind, data in frames(entry.data)]}"
    return str(entry)
