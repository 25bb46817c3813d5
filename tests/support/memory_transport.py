"""Transport in memory between a client and servers of one process. Queues hold its messages.

This module has both halves, so it shows everything that a new transport must provide.
"""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from shoal import _transport, errors
from shoal._transport import Target, Transport, TransportFactory, read_message
from shoal._wire import Assembler, PullAssembly, PullDecoder, PushPayload, decode_push
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server import serving
from shoal_server.serving import (
    DataService,
    Endpoint,
    EndpointConfig,
    EndpointFactory,
    PushReply,
    PushSource,
    from_chunks,
    from_region,
    replies,
    required,
    stamp_of,
)

NAME = "memory"
ANSWER_TIMEOUT_S = 120.0


class Line:
    """Connection of one client and one server. Closing it wakes the other end."""

    def __init__(self) -> None:
        self.calls: queue.SimpleQueue[tuple[str, bytes, np.ndarray | None]] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[str, bytes | errors.ShoalError]] = queue.SimpleQueue()
        self.over = False

    def hang_up(self) -> None:
        self.over = True
        self.calls.put(("over", b"", None))
        self.answers.put(("over", b""))

    def next_call(self) -> tuple[str, bytes, np.ndarray | None]:
        """Returns the next call, without late wake-ups of a pull."""
        while (call := self.calls.get())[0] == "woken":
            pass
        return call


# The client's half.


class MemoryTransport(Transport):
    def __init__(self, line: Line, target: Target) -> None:
        self.line, self._target = line, target
        self._lent = 0

    @property
    def broken(self) -> bool:
        return self.line.over

    def memory(self) -> tuple[int, np.ndarray]:
        self._lent += 1
        return self._lent, np.empty(self._target.layout.region_bytes, np.uint8)

    def pull(self, request: pb.PullRequest, pull_decoder: PullDecoder | None) -> list[header_pb2.ShardHeader]:
        self.line.calls.put(("pull", request.SerializeToString(), None))
        assembly = PullAssembly(self._target.layout, pull_decoder)
        with self._whole():
            while message := self._answer(None):
                assembly.add(read_message(pb.PullReply, message, assembly.assembler)[0])
            return assembly.finish()

    def push(self, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        return self._push("push", header, payload)

    def assign(self, header: pb.PushHeader, payload: PushPayload) -> None:
        self._push("assign", header, payload)

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        self.line.calls.put(("commit", request.SerializeToString(), None))
        with self._whole():
            return pb.PushReply.FromString(self._answer(ANSWER_TIMEOUT_S))

    def close(self) -> None:
        self.line.hang_up()

    def _push(self, call: str, header: pb.PushHeader, payload: PushPayload) -> pb.PushReply:
        header.region = payload.region if payload.owner is self else 0
        with self._whole():
            if header.region:
                self.line.calls.put((call, pb.PushRequest(header=header).SerializeToString(), payload.copy))
            else:
                for pieces in payload.requests(header):
                    self.line.calls.put((call, b"".join(pieces), None))
                self.line.calls.put(("end", b"", None))
            return pb.PushReply.FromString(self._answer(ANSWER_TIMEOUT_S))

    @contextmanager
    def _whole(self) -> Iterator[None]:
        """Closes the connection if a call fails, because its queues may then hold any messages."""
        try:
            yield
        except _Refused as refused:
            raise refused.error from None
        except BaseException:
            self.line.hang_up()
            raise

    def _answer(self, within_s: float | None) -> bytes:
        try:
            kind, payload = self.line.answers.get(timeout=within_s)
        except queue.Empty:
            raise errors.DeadlineExceeded("no answer came", address=self._target.address) from None
        if kind == "over":
            raise errors.Unreachable("the other end hung up", address=self._target.address)
        if isinstance(payload, errors.ShoalError):
            raise _Refused(payload)
        return payload


class _Refused(Exception):
    def __init__(self, error: errors.ShoalError) -> None:
        super().__init__()
        self.error = error


class MemoryFactory(TransportFactory):
    name = title = carrier = NAME
    settings = frozenset({NAME})
    rank = 40
    attaches = False

    def open(self, target: Target, payloads: int) -> MemoryTransport:
        if target.address not in _servers:
            raise errors.Unreachable(f"no server at {target.address} in memory", address=target.address)
        return MemoryTransport(_servers[target.address].connect(), target)


# The server's half.

_servers: dict[str, "MemoryEndpoint"] = {}


class MemoryEndpoint(Endpoint):
    def __init__(self, service: DataService) -> None:
        self._service = service
        self._lines: dict[Line, threading.Thread] = {}
        self._address = ""

    def start(self, address: str) -> None:
        self._address = address
        _servers[address] = self

    def stop(self) -> None:
        _servers.pop(self._address, None)
        for line in self._lines:
            line.hang_up()
        for thread in self._lines.values():
            thread.join()

    def connect(self) -> Line:
        line = Line()
        self._lines[line] = threading.Thread(target=self._serve, args=(line,), daemon=True)
        self._lines[line].start()
        return line

    def _serve(self, line: Line) -> None:
        calls: dict[str, Callable[[Line, bytes, np.ndarray | None], bytes]]
        calls = {"pull": self._pull, "push": self._push, "commit": self._commit, "assign": self._assign}
        while True:
            call, message, region = line.next_call()
            if call == "over":
                return
            try:
                line.answers.put(("answer", calls[call](line, message, region)))
            except errors.ShoalError as error:
                line.answers.put(("error", error))

    def _pull(self, line: Line, message: bytes, _region: object) -> bytes:
        request = pb.PullRequest.FromString(message)
        pull = self._service.pull(request, lambda: line.calls.put(("woken", b"", None)))
        try:
            pull.start(stamp_of(request.stamp), request.ahead)
            while (step := pull.take()) is None:
                if line.calls.get()[0] == "over":
                    line.hang_up()
                    raise errors.Unreachable("the client left")
            with replies(pull, step, headers_only=request.headers_only) as messages:
                for pieces, _ in messages:
                    line.answers.put(("values", b"".join(pieces)))
        finally:
            if pull.waits:
                pull.abandon()
        return b""

    def _push(self, line: Line, message: bytes, region: np.ndarray | None) -> bytes:
        return self._receive(
            line, message, region, lambda *parts: _awaited(self._service.push(lambda: parts, end=lambda: None))
        )

    def _assign(self, line: Line, message: bytes, region: np.ndarray | None) -> bytes:
        return self._receive(line, message, region, self._service.assign)

    def _receive(
        self,
        line: Line,
        message: bytes,
        region: np.ndarray | None,
        call: Callable[[pb.PushHeader, PushSource], bytes],
    ) -> bytes:
        header, first = decode_push(message)
        stream = _messages(line)

        def rest(assembler: Assembler) -> Iterator[tuple[pb.PushRequest, int]]:
            return (read_message(pb.PushRequest, later, assembler) for later in stream)

        count = self._service.received(NAME)
        try:
            source = from_chunks(first, rest, count) if region is None else from_region(region, count)
            return call(required(header), source)
        finally:
            for _ in stream if region is None else ():  # skips the messages of a refused push
                pass

    def _commit(self, line: Line, message: bytes, _region: object) -> bytes:
        return _awaited(self._service.commit(pb.CommitRequest.FromString(message)))


def _awaited(reply: PushReply) -> bytes:
    """Waits until the backup has what a reply depends on."""
    while not isinstance(reply, bytes):
        ended = threading.Event()
        reply.on_end(ended.set)
        ended.wait()
        reply = reply.finish()
    return reply


def _messages(line: Line) -> Iterator[bytes]:
    """Yields the remaining messages of a push, up to its end."""
    while (call := line.next_call())[0] != "end":
        if call[0] == "over":
            line.hang_up()
            raise errors.Unreachable("the client left in the middle of a push")
        yield call[1]


class MemoryEndpoints(EndpointFactory):
    name = NAME

    def make(self, service: DataService, config: EndpointConfig) -> MemoryEndpoint:
        return MemoryEndpoint(service)


@contextmanager
def registered() -> Iterator[None]:
    """Registers this transport for servers and clients that are made meanwhile. Clients use it if it is selected."""
    _transport.register(MemoryFactory())
    serving.register(MemoryEndpoints())
    try:
        yield
    finally:
        _transport.unregister(NAME)
        serving.unregister(NAME)
