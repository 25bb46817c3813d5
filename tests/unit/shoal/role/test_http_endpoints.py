"""HTTP endpoints of a role: their contents, and that a slow client delays no other."""

import gzip
import http.client
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from email.message import Message
from typing import Any

import prometheus_client
import psutil
import pytest
from prometheus_client.registry import Collector

from shoal import errors
from shoal._limits import refusals
from shoal._role import http_endpoints
from shoal._role.http_endpoints import RoleHttpServer
from shoal._security import AccessRole, Authorizer, Principal, open_authorizer
from shoal._security.tokens import TokenSigner, TokenVerifier
from support.waiting import wait_until


@pytest.fixture
def registry() -> prometheus_client.CollectorRegistry:
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.Counter("shoal_test_calls_total", "Calls.", registry=registry).inc(3)
    return registry


@pytest.fixture
def pages(registry: prometheus_client.CollectorRegistry) -> Iterator[RoleHttpServer]:
    pages = RoleHttpServer("127.0.0.1:0", registry)
    pages.authorizer = open_authorizer()
    yield pages
    pages.stop()
    wait_until(lambda: not any(thread.name.startswith("page") for thread in threading.enumerate()))


def fetch(pages: RoleHttpServer, path: str, method: str = "GET", **headers: str) -> tuple[int, Message, bytes]:
    connection = http.client.HTTPConnection(pages.address, timeout=10)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): text for name, text in headers.items()})
        reply = connection.getresponse()
        return reply.status, reply.headers, reply.read()
    finally:
        connection.close()


def connect(pages: RoleHttpServer) -> socket.socket:
    host, port = pages.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=10)


def ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(100) == b""
    except ConnectionResetError:
        return True


def peers() -> set[tuple[str, int]]:
    """The other ends of this process's connections."""
    ends: list[Any] = [connection.raddr for connection in psutil.Process().net_connections("tcp4")]
    return {(end.ip, end.port) for end in ends if end}


def test_metrics_need_a_token_of_a_reader(pages: RoleHttpServer) -> None:
    signer = TokenSigner(TokenSigner.new_key())

    def bearer(role: AccessRole, by: TokenSigner = signer) -> str:
        return f"Bearer {by.sign(Principal('ann', role), valid_s=60)}"

    pages.authorizer = Authorizer()
    assert fetch(pages, "/metrics", Authorization=bearer(AccessRole.READER))[0] == 503  # no key yet
    pages.authorizer.require(TokenVerifier(signer.public_key))
    status, headers, body = fetch(pages, "/metrics")
    assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
    assert b"shoal token create" in body
    assert b'curl --header "Authorization: Bearer $(cat FILE)"' in body
    another = TokenSigner(TokenSigner.new_key())
    assert fetch(pages, "/metrics", Authorization=bearer(AccessRole.READER, another))[0] == 401
    found = {role: fetch(pages, "/metrics", Authorization=bearer(role))[0] for role in AccessRole}
    readers = {AccessRole.ADMIN, AccessRole.SUBMITTER, AccessRole.READER}
    of_no_server = {AccessRole.COORDINATOR: 401}  # this process is not the server that such a token names
    assert found == {role: 200 if role in readers else 403 for role in AccessRole} | of_no_server
    assert fetch(pages, "/healthz")[0] == 503  # without a token, of a role that has not started


def test_health_is_that_of_the_role(pages: RoleHttpServer) -> None:
    assert fetch(pages, "/healthz")[0::2] == (503, b"starting\n")
    pages.not_ready = ""
    assert fetch(pages, "/healthz")[0::2] == (200, b"ok\n")
    assert fetch(pages, "/healthz?probe=1", "HEAD")[0::2] == (200, b"")
    pages.not_ready = "stopping"
    assert fetch(pages, "/healthz")[0::2] == (503, b"stopping\n")


def test_metrics_are_in_the_format_that_is_asked_for(pages: RoleHttpServer) -> None:
    status, headers, body = fetch(pages, "/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain")
    assert int(headers["Content-Length"]) == len(body)
    assert b"shoal_test_calls_total 3.0" in body
    _, headers, body = fetch(pages, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert headers["Content-Type"].startswith("application/openmetrics-text")
    assert body.endswith(b"# EOF\n")
    _, headers, body = fetch(pages, "/metrics", Accept_Encoding="gzip")
    assert b"shoal_test_calls_total" in gzip.decompress(body)


def test_unknown_path_names_the_pages(pages: RoleHttpServer) -> None:
    for path in ("/", "/metric", "/metrics/x", "/%2e%2e/healthz"):
        status, _, body = fetch(pages, path)
        assert (status, body) == (404, b"not found; this server has /metrics and /healthz\n")


def test_failing_page_does_not_affect_other_pages(
    pages: RoleHttpServer, registry: prometheus_client.CollectorRegistry, capfd: pytest.CaptureFixture[str]
) -> None:
    class Broken(Collector):
        def collect(self) -> list[Any]:
            raise RuntimeError("no figures")

    registry.register(Broken())
    assert fetch(pages, "/metrics")[0] == 500
    pages.not_ready = ""
    assert fetch(pages, "/healthz")[0] == 200


def test_slow_request_is_disconnected(pages: RoleHttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_endpoints, "CONNECTION_S", 0.2)
    with connect(pages) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: ")
        assert ended(slow), "though the time of a single read is not over"


def test_client_that_does_not_read_is_disconnected(
    pages: RoleHttpServer, registry: prometheus_client.CollectorRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    prometheus_client.Info("large", "More than the sockets hold.", registry=registry).info({"text": "x" * (32 << 20)})
    monkeypatch.setattr(http_endpoints, "CONNECTION_S", 1.0)
    with connect(pages) as slow:
        slow.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        # Its end is closed, though it has not sent everything.
        wait_until(lambda: slow.getsockname() in peers())
        wait_until(lambda: slow.getsockname() not in peers())


def test_a_collector_that_hangs_holds_up_neither_health_nor_the_end(
    registry: prometheus_client.CollectorRegistry,
) -> None:
    class Hanging(Collector):
        def collect(self) -> list[Any]:
            asked.set()
            go_on.wait(30)
            return []

    asked, go_on = threading.Event(), threading.Event()
    registry.register(Hanging())
    pages = RoleHttpServer("127.0.0.1:0", registry)
    pages.authorizer = open_authorizer()
    with connect(pages) as waiting:
        waiting.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert asked.wait(10)
        assert fetch(pages, "/healthz")[0] == 503
        pages.stop()
        assert waiting.recv(1000).startswith((b"", b"HTTP/1.1 500 "))
    go_on.set()
    wait_until(lambda: not any(thread.name.startswith("page") for thread in threading.enumerate()))


def test_the_web_server_is_loaded_with_the_first_connection() -> None:
    code = """
import sys, urllib.request, prometheus_client, shoal._role.http_endpoints
pages = shoal._role.http_endpoints.RoleHttpServer("127.0.0.1:0", prometheus_client.CollectorRegistry())
print(sorted({"uvicorn", "starlette"} & sys.modules.keys()))
pages.not_ready = ""
print(urllib.request.urlopen(f"http://{pages.address}/healthz").read())
pages.stop()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\nb'ok\\n'\n"


def test_stop_without_a_connection_frees_the_port(registry: prometheus_client.CollectorRegistry) -> None:
    pages = RoleHttpServer("127.0.0.1:0", registry)
    pages.stop()
    host, port = pages.address.rsplit(":", 1)
    socket.create_server((host, int(port))).close()


@pytest.mark.parametrize("limit", ["HTTP_CONNECTIONS", "HOST_HTTP_CONNECTIONS"])
def test_a_probe_is_answered_when_its_host_has_all_connections(
    pages: RoleHttpServer, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    """The oldest connection makes room for it, so there are never more of them."""
    name = {"HTTP_CONNECTIONS": "MAX_CONNECTIONS", "HOST_HTTP_CONNECTIONS": "MAX_HOST_CONNECTIONS"}[limit]
    monkeypatch.setattr(http_endpoints, name, 3)
    pages.not_ready, before = "", refusals("server")[limit]
    idle = [connect(pages) for _ in range(3)]
    assert fetch(pages, "/healthz")[0] == 200
    assert idle[0].recv(1) == b""
    assert refusals("server")[limit] == before + 1
    for connection in idle[1:]:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200 ")
        connection.close()
    idle[0].close()


def test_its_end_is_that_of_its_connections(registry: prometheus_client.CollectorRegistry) -> None:
    pages = RoleHttpServer("127.0.0.1:0", registry)
    with connect(pages) as idle:
        assert fetch(pages, "/healthz")[0] == 503, "answered after that connection"
        pages.stop()
        assert idle.recv(100) == b""


def test_a_port_that_is_taken(pages: RoleHttpServer, registry: prometheus_client.CollectorRegistry) -> None:
    with pytest.raises(errors.PortInUse, match=f"cannot serve metrics: .*{pages.address}"):
        RoleHttpServer(pages.address, registry)


def test_advertised_address_is_reachable(registry: prometheus_client.CollectorRegistry) -> None:
    for listen, found in (("0.0.0.0:0", "server-0.server"), ("127.0.0.1:0", "127.0.0.1")):
        pages = RoleHttpServer(listen, registry, advertise="server-0.server")
        try:
            assert re.fullmatch(rf"{re.escape(found)}:[1-9]\d*", pages.address)
        finally:
            pages.stop()
