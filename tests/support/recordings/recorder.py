"""Recorder of a conversation between real clients and real servers."""

import functools
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import grpc

from shoal.v1 import parameter_server_pb2 as pb
from support.recordings.conversation import Advance, Call, Entry, LaneTurn, Names, token_of
from support.recordings.raw_calls import RawServer, make_call
from support.recordings.raw_lanes import LaneTap


class Recorder:
    """Taps before servers and the coordinator, and everything that passed through them. `with` ends the taps.

    Args:
        targets: the real addresses, by name.
        lanes: the real address of each server's lanes, by name.
        settle: waits until the coordinator has done all that it decided. It is called after each of its answers.

    Attributes:
        addresses: addresses of the taps, which clients must call, by name.
        names: the recording's stand-ins and the values that they replace.
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
        """Replaces the lanes' address for clients with that of a tap."""
        reply = pb.AttachReply.FromString(call.replies[0])
        tap = self._lane_taps[reply.address]
        reply.address = tap.address
        self.names |= {reply.token: token_of(call.to), reply.host: "host"}
        return Call(call.to, call.method, call.requests, (reply.SerializeToString(),))

    def _note(self, entry: Entry) -> None:
        entry = entry if isinstance(entry, Advance) else entry.rewritten(self.names)
        with self._lock:
            since = range(len(self.entries) - 1, self._marked - 1, -1)
            last = next((it for it in since if isinstance(entry, LaneTurn) and self.entries[it].to == entry.to), -1)
            before = self.entries[last] if last >= 0 else None
            if (
                isinstance(before, LaneTurn)
                and isinstance(entry, LaneTurn)
                and (before.lane, before.side) == (entry.lane, entry.side)
            ):
                memory = (entry.slot, entry.memory) if entry.slot else (before.slot, before.memory)
                self.entries[last] = LaneTurn(entry.lane, entry.side, before.data + entry.data, *memory)
            else:
                self.entries.append(entry)

    def mark(self) -> None:
        """Marks that all calls so far have ended. Calls to several servers at once are put in a fixed order."""
        with self._lock:
            since = self.entries[self._marked :]
            since.sort(key=lambda entry: (entry.by_coordinator, entry.to))
            self.entries[self._marked :] = since
            self._marked = len(self.entries)

    def advanced(self, seconds: float) -> None:
        """Records that the coordinator's clock has advanced."""
        self.mark()
        self._note(Advance(seconds))
        self.mark()

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
