"""Fuzz target of the ports: garbage and changed calls over sockets, to a coordinator and a server in another process.

The first byte of an input selects the kind of connection, and the second one the method of a call.
"""

import json
import os
import random
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from shoal import optim
from shoal._rpc.coordinator import CoordinatorClient
from shoal.consistency import Asynchronous
from shoal.job import Job
from shoal.v1 import coordinator_pb2, header_pb2, job_pb2
from shoal.v1 import parameter_server_pb2 as pb
from support.fuzzing.campaign import BadStatus, Target
from support.fuzzing.handler_targets import methods_of
from support.fuzzing.messages import Drawer
from support.fuzzing.mutator import mutated
from support.fuzzing.replica_targets import conversation
from support.fuzzing.text_targets import PAGE_SEEDS
from support.fuzzing.wire_targets import JOB, VARIABLES, WORDS, WORKER, frame, lane_conversations, push_messages
from support.waiting import wait_until

_TIMEOUT_S = 10.0
_ANSWER_S = 0.3  # for connections on which an answer may never come
_NO_LINGER = struct.pack("ii", 1, 0)
_HELLO, _ERROR = 1, 8
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_RAW, _LANE, _PAGE, _CALL = range(4)


def _http2(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


# Literal header fields without indexing, as HPACK writes them.
_HEADERS = b"".join(
    b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/shoal.v1.Jobs/List"),
        (b":authority", b"localhost"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
        (b"grpc-timeout", b"1S"),
    )
)
HTTP2_SEEDS = [
    _PREFACE + _http2(4, 0, 0, b"") + _http2(1, 4, 1, _HEADERS) + _http2(0, 1, 1, bytes(5)),
    _PREFACE + _http2(4, 0, 0, struct.pack(">HI", 4, 2**31 - 1)) + _http2(8, 0, 0, struct.pack(">I", 2**31 - 1)),
    _PREFACE + _http2(4, 0, 0, b"") + _http2(6, 0, 0, bytes(8)) + _http2(3, 0, 1, bytes(4)) + _http2(7, 0, 0, bytes(8)),
    b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),
]


class Sockets:
    """Connections to all ports of a coordinator and a server."""

    name = "sockets"
    allowed: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.fuzzing.roles"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self._process.stdout
        addresses = json.loads(self._process.stdout.readline())
        self._coordinator, self._server = addresses[:2]
        self._page = addresses[2].partition("://")[2].rstrip("/")
        self._channels = {address: grpc.insecure_channel(address) for address in (self._coordinator, self._server)}
        self._run_job()
        offer = pb.AttachReply.FromString(self._call(self._server, "/shoal.v1.ParameterServer/Attach", b""))
        self._lane = offer.address
        self._hello = frame(_HELLO, pb.LaneHello(token=offer.token).SerializeToString())
        self._replicas = [b"".join(it) for it in conversation(Asynchronous(), optim.SGD(0.1))]
        self._drawer = Drawer(WORDS | {"worker": [WORKER], "member": [WORKER, "x"], "wait_s": [0.0], "no_wait": [True]})
        self._methods = [
            (self._coordinator, f"/shoal.v1.{service}/{name}", kind)
            for file, service in ((coordinator_pb2, "Coordinator"), (job_pb2, "Jobs"))
            for name, kind in methods_of(file, service)
            # These would end the job that the others need.
            if name not in ("Cancel", "Drop", "Leave", "Finish", "Drain", "DrainServer")
        ]
        self._methods += [
            (self._server, f"/shoal.v1.ParameterServer/{name}", kind)
            for name, kind in methods_of(pb, "ParameterServer")
            if name not in ("DropShards", "FenceWorkers", "ReleaseWorkers", "HoldCommits")
        ]
        # Anybody may make these, with any name of a service.
        self._methods += [
            (address, f"/grpc.health.v1.Health/{name}", kind)
            for address in (self._coordinator, self._server)
            for name, kind in methods_of(health_pb2, "Health")
        ]
        self._kinds: dict[int, Callable[[bytes], None]] = {
            _RAW: self._send_raw,
            _LANE: self._send_lane,
            _PAGE: self._send_page,
            _CALL: self._send_call,
        }

    def resident_bytes(self) -> int:
        """Returns the resident memory of the roles' process."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def _run_job(self) -> None:
        """Brings a job to its first step on the server, with one worker."""
        client = CoordinatorClient(self._coordinator, retry_for_s=_TIMEOUT_S)
        register = coordinator_pb2.RegisterRequest(role=coordinator_pb2.SESSION, member=WORKER, process="p")
        life = client.call(client.members.Register, register).incarnation
        spec = Job("", name=JOB, workers=1, consistency=Asynchronous(), shards=2)
        client.call(client.jobs.Submit, job_pb2.SubmitRequest(spec=spec.to_proto()))
        who: dict[str, Any] = {"job": JOB, "worker": WORKER, "incarnation": life}
        variables = [variable.to_proto(name) for name, variable in VARIABLES.items()]
        client.call(client.jobs.Describe, job_pb2.DescribeRequest(**who, variables=variables))
        wait_until(lambda: client.call(client.jobs.Join, job_pb2.JoinRequest(**who)).ready, what="the job")
        client.close()

    def draw(self, draw: random.Random) -> bytes:
        kind = draw.choice((_RAW, _LANE, _PAGE, _CALL, _CALL, _CALL))
        index = draw.randrange(len(self._methods))
        if kind == _RAW:
            data = mutated(draw, HTTP2_SEEDS)
        elif kind == _LANE:
            # The server is the primary of the job, so it refuses to be its backup.
            sent = [*lane_conversations(), *self._replicas]
            data = mutated(draw, [self._hello + it for it in sent])
            if draw.random() < 0.6:
                data = self._hello + mutated(draw, sent)
        elif kind == _PAGE:
            data = mutated(draw, [_http1(it) for it in PAGE_SEEDS])
        else:
            seeds = {"Push": push_messages(), "Assign": push_messages()}.get(
                self._methods[index][1].rpartition("/")[2], []
            )
            data = self._drawer.encoded(draw, self._methods[index][2], seeds)
        return bytes([kind, index]) + data

    def run(self, data: bytes) -> None:
        kind, index, rest = data[0] % 4, data[1:2], data[2:]
        self._kinds[kind](index + rest if kind == _CALL else rest)
        assert self._process.poll() is None, "the roles have ended"

    def _send_call(self, data: bytes) -> None:
        address, method, _ = self._methods[data[0] % len(self._methods)]
        with suppress(grpc.RpcError):
            self._call(address, method, data[1:])

    def _call(self, address: str, method: str, data: bytes) -> bytes:
        channel: Any = self._channels[address]
        name = method.rpartition("/")[2]
        try:
            if name in ("Push", "Assign"):
                return bytes(channel.stream_unary(method)(iter([data, push_messages()[1]]), timeout=_TIMEOUT_S))
            if name in ("Pull", "Watch"):
                within_s = _ANSWER_S if name == "Watch" else _TIMEOUT_S
                return b"".join(channel.unary_stream(method)(data, timeout=within_s))
            within_s = _ANSWER_S if name == "Join" else _TIMEOUT_S
            return bytes(channel.unary_unary(method)(data, timeout=within_s))
        except grpc.RpcError as error:
            failure: Any = error
            if failure.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
                raise BadStatus(f"{method}: {failure.code().name}: {failure.details()}") from None
            raise

    def _send_raw(self, data: bytes) -> None:
        address = self._server if len(data) % 2 else self._coordinator
        self._exchange(address, data, answer_s=0.002)

    def _send_lane(self, data: bytes) -> None:
        answers = self._exchange(self._lane, data, answer_s=_TIMEOUT_S)
        while len(answers) >= 8:
            size = int.from_bytes(answers[4:8], "little")
            if answers[0] == _ERROR:
                detail = header_pb2.ErrorDetail.FromString(answers[8 : 8 + size])
                if detail.code == "INTERNAL":
                    raise BadStatus(f"lane: {detail.message}")
            answers = answers[8 + size :]

    def _send_page(self, data: bytes) -> None:
        answer = self._exchange(self._page, data, answer_s=_ANSWER_S, first=True)
        if answer.startswith(b"HTTP/1.1 500"):
            raise BadStatus(f"page: {answer[:300]!r}")

    def _exchange(self, address: str, data: bytes, *, answer_s: float, first: bool = False) -> bytes:
        """Sends data to a port, and returns what comes back within a time: all of it, or the first part."""
        host, _, port = address.rpartition(":")
        answer = b""
        with socket.create_connection((host, int(port)), _TIMEOUT_S) as connection, suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            connection.settimeout(answer_s)
            while part := connection.recv(1 << 16):
                answer += part
                if first:
                    break
        return answer

    def stop(self) -> None:
        for channel in self._channels.values():
            channel.close()
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)


def _http1(seed: bytes) -> bytes:
    """Returns a request of the page's target as HTTP/1.1 has it."""
    head, _, body = seed.partition(b"\n\n")
    method, target, *fields = head.split(b"\n")
    lines = [b"%s %s HTTP/1.1" % (method, target), *fields, b"content-length: %d" % len(body), b"connection: close"]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def targets() -> list[Target]:
    """Returns the targets of this module."""
    return [Sockets()]
