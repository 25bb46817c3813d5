"""Recordings of the wire: how calls and frames are noted, kept in files, compared, and played to either side.

A conversation is what passes between clients and servers, in order, as bytes: gRPC messages, statuses, error details,
and the frames of lanes. `Recorder` stands between real clients and real servers and notes it. `Playing` is a client
that sends what was recorded. `Players` are servers that answer with what was recorded.

Bytes are compared as they are, except in messages that cannot be the same twice:

- `STAND_INS` lists the fields that hold an address, a secret or a version of the process at hand. The recording has a
  fixed value in place of each, and a replay puts the present value back. So the test still checks that the field
  holds the right value.
- `CLEARED` lists the fields that hold a time which no caller can pass in.
- Protobuf does not fix the order of a map's entries. A message type that can hold a map is decoded and encoded again
  with its entries in order. Unknown fields stay, so a field whose number has changed is still found.

`rewritten` does all three, and leaves the bytes of every other type alone.
"""

import base64
import functools
import hashlib
import json
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import grpc
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from shoal._transport.segment import Segment
from shoal.v1 import coordinator_pb2, header_pb2, job_pb2
from shoal.v1 import parameter_server_pb2 as pb

FOLDER = Path(__file__).parents[2] / "golden" / "wire"
CHECKPOINT = FOLDER / "checkpoint"
ERROR_KEY = "shoal-error-bin"
TIMEOUT_S = 20.0

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
        *("CreateShards", "DropShards", "AdmitWorker", "FenceWorker", "ReleaseWorker"),
        *("Hold", "GiveUpHold", "Save", "CollectFiles", "Restore"),
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
        to: who is called: "coordinator", "server-0" and so on.
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
        """The same call in its comparable form."""
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
class Turn:
    """What one side of a lane says until the other one speaks.

    Attributes:
        lane: "server-0/1" is the second lane to this server, in the order in which they were opened.
        side: who speaks.
        data: the frames.
        slot: the slot of shared memory that the call is about, from 1; 0: none.
        memory: what is in that slot: before a push is answered, after a pull is.
    """

    lane: str
    side: Side
    data: bytes
    slot: int = 0
    memory: bytes = b""

    @property
    def to(self) -> str:
        """The server."""
        return self.lane.partition("/")[0]

    @property
    def by_coordinator(self) -> bool:
        """Always false: the coordinator uses no lanes."""
        return False

    def rewritten(self, names: Names) -> "Turn":
        """The same turn in its comparable form."""
        pieces = []
        for kind, data in frames(self.data):
            known = _LANE_KINDS.get(kind)
            payload = rewritten(known, data, names) if known else data
            pieces.append(HEADER.pack(kind, bytes(3), len(payload)) + payload)
        return Turn(self.lane, self.side, b"".join(pieces), self.slot, self.memory)

    def to_json(self) -> dict[str, Any]:
        record = {"lane": self.lane, "side": self.side, "data": _text(self.data)}
        return record | ({"slot": self.slot, "memory": _text(zlib.compress(self.memory, 9))} if self.slot else {})


@dataclass(frozen=True)
class Advance:
    """The coordinator's clock goes on by so many seconds."""

    seconds: float
    to = ""
    by_coordinator = False

    def to_json(self) -> dict[str, Any]:
        return {"advance": self.seconds}


Entry = Call | Turn | Advance


def rewritten(kind: Descriptor, data: bytes, names: Names) -> bytes:
    """A message in its comparable form: see above. Bytes that need no rewriting are returned as they are."""
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
    """What stands for the token of a server's lanes."""
    return hashlib.sha256(server.encode()).digest()


def frames(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The frames of a lane's bytes: kind and payload."""
    while data:
        kind, reserved, size = HEADER.unpack_from(data)
        assert reserved == bytes(3)
        assert len(data) >= HEADER.size + size, "a turn ends within a frame"
        yield kind, data[HEADER.size : HEADER.size + size]
        data = data[HEADER.size + size :]


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def write(path: Path, entries: Sequence[Entry]) -> None:
    """Writes a conversation: a JSON object a line, with bytes in base64, and memory compressed by zlib before that."""
    path.write_text("".join(json.dumps(entry.to_json()) + "\n" for entry in entries))


def load(path: Path) -> list[Entry]:
    """What `write` has written."""
    return [_entry(json.loads(line)) for line in path.read_text().splitlines()]


def _entry(record: dict[str, Any]) -> Entry:
    if "advance" in record:
        return Advance(record["advance"])
    decode = base64.b64decode
    if "lane" in record:
        memory = zlib.decompress(decode(record["memory"])) if "memory" in record else b""
        return Turn(record["lane"], record["side"], decode(record["data"]), record.get("slot", 0), memory)
    messages = {name: tuple(map(decode, record[name])) for name in ("requests", "replies")}
    return Call(**record | messages | {"error": decode(record["error"])})


def shown(entry: Entry) -> str:
    """An entry for people, in messages of failed tests."""
    match entry:
        case Call():
            method = METHODS[entry.method]
            said = [str(GetMessageClass(method.input_type).FromString(it)) for it in entry.requests]
            answered = [str(GetMessageClass(method.output_type).FromString(it)) for it in entry.replies]
            raw = hashlib.sha256(b"".join((*entry.requests, *entry.replies))).hexdigest()[:16]
            end = f"{entry.status} {entry.details} error={entry.error!r} sha256={raw}"
            return "\n".join([f"{entry.method} to {entry.to}", *said, "->", *answered, end])
        case Turn():
            return f"lane {entry.lane}, {entry.side}: {[(kind, data[:200]) for kind, data in frames(entry.data)]}"
    return str(entry)


# gRPC, as bytes.


class RawServer(grpc.GenericRpcHandler):
    """A gRPC server that answers any method with bytes; `with` ends it.

    Args:
        answer: gives the end of a call from its target's method and requests.
    """

    def __init__(self, answer: Callable[[str, tuple[bytes, ...]], Call]) -> None:
        self._answer = answer
        self._pool = ThreadPoolExecutor(16, thread_name_prefix="raw")
        self._server = grpc.server(self._pool, options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers((self,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def service(self, details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        def handler(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
            call = self._answer(details.method, tuple(requests))
            yield from call.replies
            if call.status != "OK":
                if call.error:
                    context.set_trailing_metadata(((ERROR_KEY, call.error),))
                context.abort(grpc.StatusCode[call.status], call.details)

        return grpc.stream_stream_rpc_method_handler(handler)

    def close(self) -> None:
        self._server.stop(0).wait()
        self._pool.shutdown()


def make_call(channel: grpc.Channel, to: str, method: str, requests: Sequence[bytes]) -> Call:
    """Makes a call and takes down how it ends."""
    replies = []
    stub: Any = channel.stream_stream(method)  # bytes, as there is no serializer
    call = stub(iter(requests), timeout=TIMEOUT_S)
    status, details, error = "OK", "", b""
    try:
        replies += call
    except grpc.RpcError:
        status, details = call.code().name, call.details()
        error = dict(call.trailing_metadata() or ()).get(ERROR_KEY, b"")
    return Call(to, method, tuple(requests), tuple(replies), status, details, error)


def make_calls(address: str, requests: Sequence[tuple[str, bytes]]) -> list[Call]:
    """Asks a coordinator several things, each by its method and request, one after the other."""
    with ExitStack() as stack:
        channel = grpc.insecure_channel(address)
        stack.callback(channel.close)
        calls = [make_call(channel, "coordinator", method, [request]) for method, request in requests]
    return [call.rewritten({}) for call in calls]


# Between real clients and real servers.


class Recorder:
    """Taps before servers and the coordinator, and what has passed through them; `with` ends them.

    Args:
        targets: the real addresses, by name.
        lanes: the real address of each server's lanes, by name.
        settle: waits until the coordinator has done all that it decided; called after each of its answers.

    Attributes:
        addresses: of the taps, by name: where clients are to call.
        names: what stands in the recording for what.
        entries: the conversation so far.
    """

    def __init__(
        self,
        targets: Mapping[str, str],
        lanes: Mapping[str, str] | None = None,
        names: Names | None = None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._stack = ExitStack()
        self._settle = settle
        self._lock = threading.Lock()  # guards entries
        self.entries: list[Entry] = []
        self._marked = 0
        self.addresses: dict[str, str] = {}
        self.names: dict[str | bytes, str | bytes] = dict(names or {})
        self._lane_taps: dict[str | bytes, LaneTap] = {}
        for name, address in (lanes or {}).items():
            tap = LaneTap(name, address, self.names, self._note)
            self._stack.callback(tap.close)
            self._lane_taps[address] = tap
            self.names[tap.address] = f"{name}.lanes:1"
        for name, address in targets.items():
            self.add(name, address)

    def add(self, name: str, address: str) -> None:
        """Puts a tap before one more target."""
        channel = grpc.insecure_channel(address)
        self._stack.callback(channel.close)
        tap = RawServer(functools.partial(self._forward, channel, name))
        self._stack.callback(tap.close)
        self.addresses[name] = tap.address
        self.names[tap.address] = f"{name}:1"

    def _forward(self, channel: grpc.Channel, name: str, method: str, requests: tuple[bytes, ...]) -> Call:
        if name == "coordinator":
            self.mark()
        call = make_call(channel, name, method, requests)
        if method.endswith("/Attach"):
            call = self._attached(call)
        self._note(call)
        if name == "coordinator":
            self._settle()
            self.mark()
        return call

    def _attached(self, call: Call) -> Call:
        """Leads the client's lanes through a tap."""
        reply = pb.AttachReply.FromString(call.replies[0])
        tap = self._lane_taps[reply.address]
        reply.address = tap.address
        self.names |= {reply.token: token_of(call.to), reply.host: "host"}
        return Call(call.to, call.method, call.requests, (reply.SerializeToString(),))

    def _note(self, entry: Entry) -> None:
        entry = entry if isinstance(entry, Advance) else entry.rewritten(self.names)
        with self._lock:
            since = range(len(self.entries) - 1, self._marked - 1, -1)
            last = next((it for it in since if isinstance(entry, Turn) and self.entries[it].to == entry.to), -1)
            before = self.entries[last] if last >= 0 else None
            if (
                isinstance(entry, Turn)
                and isinstance(before, Turn)
                and (before.lane, before.side) == (entry.lane, entry.side)
            ):
                memory = (entry.slot, entry.memory) if entry.slot else (before.slot, before.memory)
                self.entries[last] = Turn(entry.lane, entry.side, before.data + entry.data, *memory)
            else:
                self.entries.append(entry)

    def mark(self) -> None:
        """Says that all that was begun has ended: calls to several servers at once are put in one order."""
        with self._lock:
            since = self.entries[self._marked :]
            since.sort(key=lambda entry: (entry.by_coordinator, entry.to))
            self.entries[self._marked :] = since
            self._marked = len(self.entries)

    def advanced(self, seconds: float) -> None:
        """Notes that the coordinator's clock went on."""
        self.mark()
        self._note(Advance(seconds))
        self.mark()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


class LaneTap:
    """A socket between clients and a server's lanes; `close` ends it.

    Args:
        name: of the server.
        address: of its lanes.
        names: gets what stands for a segment's name and nonce.
        note: takes each turn, frame by frame.
    """

    def __init__(
        self, name: str, address: str, names: dict[str | bytes, str | bytes], note: Callable[[Turn], None]
    ) -> None:
        self._name = name
        host, _, port = address.rpartition(":")
        self._upstream = host, int(port)
        self._names, self._note = names, note
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._sockets: list[socket.socket] = []
        self._acceptor = threading.Thread(target=self._accept, name="lane-tap")
        self._acceptor.start()

    def _accept(self) -> None:
        pumps = []
        lane = 0
        with suppress(OSError):  # closed
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(self._upstream)
                self._sockets += [client, server]
                state = _LaneState(f"{self._name}/{lane}", self._names, self._note)
                for side, source, target in (("client", client, server), ("server", server, client)):
                    pumps.append(threading.Thread(target=state.pump, args=(side, source, target)))
                    pumps[-1].start()
                lane += 1
        for pump in pumps:
            pump.join()

    def close(self) -> None:
        for each in (self._listener, *self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._acceptor.join()
        for each in (self._listener, *self._sockets):
            each.close()


class _LaneState:
    """One lane that passes through a tap: its shared memory, and the slot of the call at hand."""

    def __init__(self, lane: str, names: dict[str | bytes, str | bytes], note: Callable[[Turn], None]) -> None:
        self._lane, self._names, self._note = lane, names, note
        self._memory: SlotMemory | None = None
        self._slot = 0

    def pump(self, side: Side, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError, EOFError):
            while True:
                kind, data = read_frame(source)
                self._take_down(side, kind, data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        if side == "client" and self._memory:
            self._memory.close()

    def _take_down(self, side: Side, kind: int, data: bytes) -> None:
        slot, memory, payload = 0, b"", data[HEADER.size :]
        if kind == HELLO:
            hello = pb.LaneHello.FromString(payload)
            if hello.HasField("segment"):
                self._memory = SlotMemory(hello.segment)
                self._names |= {hello.segment.name: "shoal-" + "0" * 32, hello.segment.nonce: bytes(16)}
        elif kind == PULL:
            self._slot = pb.PullRequest.FromString(payload).slot
        elif kind == PUSH:
            slot = pb.PushRequest.FromString(payload).header.slot
        elif kind == END and side == "server":
            slot, self._slot = self._slot, 0
        if slot and self._memory:
            memory = self._memory.read(slot)
        self._note(Turn(self._lane, side, data, slot, memory))


class SlotMemory:
    """The slots of a segment that a client has offered, as a server sees them."""

    def __init__(self, said: pb.Segment) -> None:
        self._slot_bytes = said.slot_bytes
        self._segment = Segment.open(said.name, said.slots * said.slot_bytes, said.nonce)

    def read(self, slot: int) -> bytes:
        return bytes(self._segment.view((slot - 1) * self._slot_bytes, self._slot_bytes))

    def close(self) -> None:
        self._segment.close()


def read_frame(source: socket.socket) -> tuple[int, bytes]:
    """A whole frame, header and all; EOFError if there is none."""
    header = read_exactly(source, HEADER.size)
    kind, _, size = HEADER.unpack(header)
    return kind, header + read_exactly(source, size)


def read_exactly(source: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = source.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


# A client that says what was recorded.


class Playing:
    """The client's side of a conversation, played to real servers; `with` closes its connections.

    Args:
        addresses: of the real servers and the coordinator, by name.
        names: what stands in the recording for what.
        advance: has the coordinator's clock go on.
        settle: waits until the coordinator has done all that it decided.

    Attributes:
        answers: the conversation as it went this time, without the calls that the coordinator made by itself.
    """

    def __init__(
        self,
        addresses: Mapping[str, str],
        names: Names,
        *,
        advance: Callable[[float], None] = lambda _: None,
        settle: Callable[[], None] = lambda: None,
    ) -> None:
        self._stack = ExitStack()
        self._channels = {name: grpc.insecure_channel(address) for name, address in addresses.items()}
        for channel in self._channels.values():
            self._stack.callback(channel.close)
        self._names = dict(names)
        self._advance, self._settle = advance, settle
        self._lanes: dict[str, socket.socket] = {}
        self._segments: dict[str, tuple[Segment, int]] = {}
        self._lane_addresses: dict[str, tuple[str, int]] = {}

    def play(self, entry: Entry) -> Entry:
        """Does what the client did, and says what the server did this time."""
        match entry:
            case Advance():
                self._advance(entry.seconds)
                return entry
            case Turn():
                return self._say(entry) if entry.side == "client" else self._hear(entry)
        return self._call(entry)

    def _call(self, entry: Call) -> Call:
        back = {stand_in: name for name, stand_in in self._names.items()}
        kind = METHODS[entry.method].input_type
        requests = [rewritten(kind, request, back) for request in entry.requests]
        call = make_call(self._channels[entry.to], entry.to, entry.method, requests)
        if call.method.endswith("/Attach") and call.replies:
            reply = pb.AttachReply.FromString(call.replies[0])
            host, _, port = reply.address.rpartition(":")
            self._lane_addresses[entry.to] = host, int(port)
            self._names |= {reply.address: f"{entry.to}.lanes:1", reply.token: token_of(entry.to), reply.host: "host"}
        if call.by_coordinator or entry.to == "coordinator":
            self._settle()
        return call.rewritten(self._names)

    def _say(self, turn: Turn) -> Turn:
        if turn.lane not in self._lanes:
            address = self._lane_addresses[turn.to]
            self._lanes[turn.lane] = self._stack.enter_context(socket.create_connection(address, TIMEOUT_S))
            self._offer_memory(turn)
        if turn.slot:
            self._memory(turn)[:] = turn.memory
        back = {stand_in: name for name, stand_in in self._names.items()}
        self._lanes[turn.lane].sendall(turn.rewritten(back).data)
        return turn

    def _offer_memory(self, turn: Turn) -> None:
        for _, payload in frames(turn.data):
            hello = pb.LaneHello.FromString(payload)
            if hello.HasField("segment"):
                said = hello.segment
                segment = self._stack.enter_context(Segment.create(said.slots * said.slot_bytes))
                self._segments[turn.lane] = segment, said.slot_bytes
                self._names = {name: it for name, it in self._names.items() if it not in (said.name, said.nonce)} | {
                    segment.name: said.name,
                    segment.nonce: said.nonce,
                }

    def _hear(self, turn: Turn) -> Turn:
        heard = b""
        with suppress(EOFError, TimeoutError):
            while len(heard) < len(turn.data):
                heard += read_frame(self._lanes[turn.lane])[1]
        memory = bytes(self._memory(turn)) if turn.slot else b""
        return Turn(turn.lane, turn.side, heard, turn.slot, memory).rewritten(self._names)

    def _memory(self, turn: Turn) -> memoryview:
        segment, slot_bytes = self._segments[turn.lane]
        return segment.view((turn.slot - 1) * slot_bytes, slot_bytes)

    def __enter__(self) -> "Playing":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


# Servers that say what was recorded.


@dataclass
class Players:
    """Servers that answer as was recorded; `with` ends them.

    Args:
        entries: the conversation.
        names: what stands in the recording for what.

    Attributes:
        addresses: of the servers and the coordinator, by name.
        complaints: what clients said otherwise than was recorded.
    """

    entries: Sequence[Entry]
    names: dict[str | bytes, str | bytes] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    complaints: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._stack = ExitStack()
        self._lock = threading.Lock()  # guards what is left to be said
        calls = [entry for entry in self.entries if isinstance(entry, Call) and not self._is_elsewhere(entry)]
        self._left = {name: [call for call in calls if call.to == name] for name in {call.to for call in calls}}
        turns = [entry for entry in self.entries if isinstance(entry, Turn)]
        self._turns = {lane: [turn for turn in turns if turn.lane == lane] for lane in {turn.lane for turn in turns}}
        for name in self._left:
            server = RawServer(functools.partial(self._answer, name))
            self._stack.callback(server.close)
            self.addresses[name] = server.address
            self.names[server.address] = f"{name}:1"
        for name in sorted({turn.to for turn in turns}):
            self._listen(name)

    def _is_elsewhere(self, call: Call) -> bool:
        """Whether the coordinator makes a call by itself, which is played too: nobody makes it."""
        return call.by_coordinator and any(isinstance(it, Call) and it.to == "coordinator" for it in self.entries)

    def _answer(self, name: str, method: str, requests: tuple[bytes, ...]) -> Call:
        with self._lock:
            left = self._left[name]
            said = Call(name, method, requests).rewritten(self.names)
            expected = left[0] if left else None
            if expected is None or (said.method, said.requests) != (expected.method, expected.requests):
                wanted = shown(expected) if expected else "nothing"
                self.complaints.append(f"call {len(left)} from the end: said\n{shown(said)}\ninstead of\n{wanted}")
                return Call(name, method, requests, status="FAILED_PRECONDITION", details="it is not as recorded")
            left.pop(0)
        back = {stand_in: name for name, stand_in in self.names.items()}
        return expected.rewritten(back)

    def _listen(self, name: str) -> None:
        listener = self._stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.names[f"127.0.0.1:{listener.getsockname()[1]}"] = f"{name}.lanes:1"
        lanes = [self._turns[lane] for lane in sorted(self._turns) if lane.startswith(f"{name}/")]
        serving = threading.Thread(target=self._serve_lanes, args=(listener, lanes), name="lane-player")
        serving.start()
        self._stack.callback(serving.join)
        self._stack.callback(self._shut, listener)

    def _shut(self, listener: socket.socket) -> None:
        with suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)

    def _serve_lanes(self, listener: socket.socket, lanes: list[list[Turn]]) -> None:
        threads = []
        with suppress(OSError):  # closed
            for turns in lanes:
                client = listener.accept()[0]
                threads.append(threading.Thread(target=self._serve_lane, args=(client, turns)))
                threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve_lane(self, client: socket.socket, turns: list[Turn]) -> None:
        memory: SlotMemory | None = None
        client.settimeout(TIMEOUT_S)
        with client:
            while turns:
                turn = turns[0]
                if turn.side == "server":
                    client.sendall(turn.data)
                    turns.pop(0)
                    continue
                said = b""
                try:
                    while len(said) < len(turn.data):
                        kind, data = read_frame(client)
                        if kind == HELLO:
                            memory = self._memory_of(data[HEADER.size :])
                        said += data
                except (EOFError, OSError) as error:
                    self.complaints.append(f"a lane ended ({error!r}) before {shown(turn)}")
                    break
                held = memory.read(turn.slot) if memory and turn.slot else b""
                heard = Turn(turn.lane, "client", said, turn.slot, held).rewritten(self.names)
                if heard != turn:
                    self.complaints.append(f"said\n{shown(heard)}\ninstead of\n{shown(turn)}")
                    break
                turns.pop(0)
            if memory:
                memory.close()

    def _memory_of(self, payload: bytes) -> SlotMemory | None:
        hello = pb.LaneHello.FromString(payload)
        if not hello.HasField("segment"):
            return None
        said = hello.segment
        self.names |= {said.name: "shoal-" + "0" * 32, said.nonce: bytes(16)}
        return SlotMemory(said)

    def check(self) -> None:
        """AssertionError if clients said something else, or less, than was recorded."""
        assert not self.complaints, "\n".join(self.complaints)
        left = {name: [call.method for call in calls] for name, calls in self._left.items() if calls}
        assert not left, f"clients did not make these calls: {left}"
        silent = [shown(turn) for turns in self._turns.values() for turn in turns]
        assert not silent, f"clients did not come to these turns: {silent}"

    def __enter__(self) -> "Players":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
