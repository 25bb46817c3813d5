"""Fuzz target of the ports with TLS: garbage, changed handshakes and handshakes that do not end.

The first byte of an input selects the port, and the second one how many bytes of the rest are sent at first.
"""

import json
import os
import random
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import suppress
from pathlib import Path

from shoal._security.certificates import make_certificates
from shoal._transport import GrpcCalls
from support.certificates import credentials
from support.fuzzing.campaign import BadStatus, Target
from support.fuzzing.mutator import mutated
from support.fuzzing.socket_targets import HTTP2_SEEDS

_TIMEOUT_S, _ANSWER_S = 10.0, 0.002
_RESET = struct.pack("ii", 1, 0)
# A connection that stays open while others come and go, so that handshakes wait beside them.
_HELD = 8
_PROBE_EVERY = 256


def _extension(kind: int, data: bytes) -> bytes:
    return struct.pack(">HH", kind, len(data)) + data


def _sized(data: bytes) -> bytes:
    return struct.pack(">H", len(data)) + data


def client_hello() -> bytes:
    """Returns the first record of a TLS client, which offers TLS 1.3 and 1.2."""
    extensions = b"".join(
        (
            _extension(0, _sized(b"\0" + _sized(b"localhost"))),
            _extension(10, _sized(struct.pack(">HH", 29, 23))),  # groups: X25519 and P-256
            _extension(13, _sized(struct.pack(">HHH", 0x0403, 0x0804, 0x0401))),  # signatures
            _extension(16, _sized(b"\2h2\x08http/1.1")),
            _extension(43, b"\4\3\4\3\3"),  # versions
            _extension(51, _sized(struct.pack(">H", 29) + _sized(bytes(range(32))))),  # key share
        )
    )
    ciphers = struct.pack(">HHH", 0x1301, 0xC02B, 0xC02F)
    body = b"\3\3" + bytes(range(32)) + b"\x20" + bytes(32) + _sized(ciphers) + b"\1\0" + _sized(extensions)
    return b"\x16\3\1" + _sized(b"\1" + len(body).to_bytes(3, "big") + body)


SEEDS = [
    client_hello(),
    client_hello() + b"\x14\3\3\0\1\1" + b"\x17\3\3" + _sized(bytes(64)),
    client_hello() + b"\x15\3\3\0\2\2\x28",
    b"\x16\3\1\x40\0" + client_hello()[5:],  # a record of 16 KiB, of which little comes
    *HTTP2_SEEDS,
]


class TlsPorts:
    """Connections to the ports of a coordinator and a server that use TLS."""

    name = "tls_ports"
    allowed: tuple[type[Exception], ...] = ()

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        certificates = Path(self._folder.name) / "certificates"
        make_certificates(certificates)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.fuzzing.roles", str(certificates)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert self._process.stdout
        coordinator, server, page, endpoints = json.loads(self._process.stdout.readline())
        self._health = f"https://{endpoints}/healthz"
        self._context = ssl.create_default_context(cafile=certificates / "ca.pem")
        self._credentials = credentials(certificates, "admin")
        self._coordinator, self._server = coordinator, server
        calls = GrpcCalls(server, self._credentials)
        lane = calls.attach().address
        calls.close()
        self._ports = [_parsed(it) for it in (coordinator, server, lane, page.partition("://")[2].rstrip("/"))]
        self._ports.append(_parsed(endpoints))
        self._held: list[socket.socket] = []
        self._runs = 0

    def resident_bytes(self) -> int:
        """Returns the resident memory of the roles' process."""
        pages = Path(f"/proc/{self._process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    def draw(self, draw: random.Random) -> bytes:
        data = mutated(draw, SEEDS) if draw.random() < 0.8 else draw.choice(SEEDS)
        if draw.random() < 0.3:
            data = data[: draw.randrange(len(data) + 1)]
        return bytes([draw.randrange(256), draw.randrange(256)]) + data

    def run(self, data: bytes) -> None:
        port, first, rest = data[0] % len(self._ports), data[1:2], data[2:]
        cut = first[0] if first else 0
        connection = socket.create_connection(self._ports[port], _TIMEOUT_S)
        with suppress(OSError):
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            connection.settimeout(_ANSWER_S)
            for part in (rest[:cut], rest[cut:]):
                connection.sendall(part)
            connection.recv(1 << 16)
        self._held.append(connection)
        if len(self._held) > _HELD:
            self._held.pop(0).close()
        assert self._process.poll() is None, "the roles have ended"
        self._runs += 1
        if self._runs % _PROBE_EVERY == 0:
            self._probe()

    def _probe(self) -> None:
        """Checks that the ports still serve clients that do finish their handshakes."""
        with urllib.request.urlopen(self._health, timeout=_TIMEOUT_S, context=self._context) as reply:
            if reply.status != 200:
                raise BadStatus(f"/healthz: {reply.status}")
        calls = GrpcCalls(self._server, self._credentials)
        try:
            calls.attach()
        finally:
            calls.close()

    def stop(self) -> None:
        for connection in self._held:
            connection.close()
        self._probe()
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(30)
        self._folder.cleanup()


def _parsed(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


def targets() -> list[Target]:
    """Returns the targets of this module."""
    return [TlsPorts()]
