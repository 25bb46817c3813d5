"""Playback of a recorded conversation: `Playing` calls real servers, and `Players` answer real clients."""

import functools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

import grpc

from shoal._transport.segment import Segment
from shoal.v1 import parameter_server_pb2 as pb
from support.recordings.conversation import (
    HEADER,
    HELLO,
    METHODS,
    Advance,
    Call,
    Entry,
    LaneTurn,
    Names,
    frames,
    rewritten,
    shown,
    token_of,
)
from support.recordings.raw_calls import TIMEOUT_S, RawServer, make_call
from support.recordings.raw_lanes import SlotMemory, read_frame


class Playing:
    """The client's side of a conversation, played to real servers; `with` closes its connections.

    Args:
        addresses: addresses of the real servers and the coordinator, by name.
        names: the recording's stand-ins and the values that they replace.
        advance: advances the coordinator's clock.
        settle: waits until the coordinator has done all that it decided.

    Attributes:
        answers: this run's conversation, without the calls that the coordinator made by itself.
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
        """Repeats the client's calls. Returns the present answers of the servers."""
        match entry:
            case Advance():
                self._advance(entry.seconds)
                return entry
            case LaneTurn():
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

    def _say(self, turn: LaneTurn) -> LaneTurn:
        if turn.lane not in self._lanes:
            address = self._lane_addresses[turn.to]
            self._lanes[turn.lane] = self._stack.enter_context(socket.create_connection(address, TIMEOUT_S))
            self._offer_memory(turn)
        if turn.slot:
            self._memory(turn)[:] = turn.memory
        back = {stand_in: name for name, stand_in in self._names.items()}
        self._lanes[turn.lane].sendall(turn.rewritten(back).data)
        return turn

    def _offer_memory(self, turn: LaneTurn) -> None:
        for _, payload in frames(turn.data):
            hello = pb.LaneHello.FromString(payload)
            if hello.HasField("segment"):
                said = hello.segment
                segment = self._stack.enter_context(Segment.create(said.regions * said.region_bytes))
                self._segments[turn.lane] = segment, said.region_bytes
                self._names = {name: it for name, it in self._names.items() if it not in (said.name, said.nonce)} | {
                    segment.name: said.name,
                    segment.nonce: said.nonce,
                }

    def _hear(self, turn: LaneTurn) -> LaneTurn:
        received = b""
        with suppress(EOFError, TimeoutError):
            while len(received) < len(turn.data):
                received += read_frame(self._lanes[turn.lane])[1]
        memory = bytes(self._memory(turn)) if turn.slot else b""
        return LaneTurn(turn.lane, turn.side, received, turn.slot, memory).rewritten(self._names)

    def _memory(self, turn: LaneTurn) -> memoryview:
        segment, region_bytes = self._segments[turn.lane]
        return segment.view((turn.slot - 1) * region_bytes, region_bytes)

    def __enter__(self) -> "Playing":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@dataclass
class Players:
    """Servers that give the recorded answers; `with` ends them.

    Args:
        entries: the conversation.
        names: the recording's stand-ins and the values that they replace.

    Attributes:
        addresses: addresses of the servers and the coordinator, by name.
        complaints: differences between the clients' calls and the recorded ones.
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
        turns = [entry for entry in self.entries if isinstance(entry, LaneTurn)]
        self._turns = {lane: [turn for turn in turns if turn.lane == lane] for lane in {turn.lane for turn in turns}}
        for name in self._left:
            server = RawServer(functools.partial(self._answer, name))
            self._stack.callback(server.close)
            self.addresses[name] = server.address
            self.names[server.address] = f"{name}:1"
        for name in sorted({turn.to for turn in turns}):
            self._listen(name)

    def _is_elsewhere(self, call: Call) -> bool:
        """Returns whether the coordinator makes a call by itself. During playback, nobody makes such a call."""
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

    def _serve_lanes(self, listener: socket.socket, lanes: list[list[LaneTurn]]) -> None:
        threads = []
        with suppress(OSError):  # closed
            for turns in lanes:
                client = listener.accept()[0]
                threads.append(threading.Thread(target=self._serve_lane, args=(client, turns)))
                threads[-1].start()
        for thread in threads:
            thread.join()

    def _serve_lane(self, client: socket.socket, turns: list[LaneTurn]) -> None:
        memory: SlotMemory | None = None
        client.settimeout(TIMEOUT_S)
        with client:
            while turns:
                turn = turns[0]
                if turn.side == "server":
                    turns.pop(0)  # before the client can have the data, and `check` can run
                    client.sendall(turn.data)
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
                received = LaneTurn(turn.lane, "client", said, turn.slot, held).rewritten(self.names)
                if received != turn:
                    self.complaints.append(f"said\n{shown(received)}\ninstead of\n{shown(turn)}")
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
        """Raises AssertionError if clients sent something else, or less, than was recorded."""
        assert not self.complaints, "\n".join(self.complaints)
        left = {name: [call.method for call in calls] for name, calls in self._left.items() if calls}
        assert not left, f"clients did not make these calls: {left}"
        silent = [shown(turn) for turns in self._turns.values() for turn in turns]
        assert not silent, f"clients did not come to these turns: {silent}"

    def __enter__(self) -> "Players":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
