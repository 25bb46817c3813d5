"""The coordinator's metric of wanted workers, over TLS."""

import http.server
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from shoal import errors
from shoal._engines import read_wanted_workers
from shoal._security.certificates import issue_certificate, make_certificates

METRICS = b"# HELP shoal_coordinator_wanted_workers n\nshoal_coordinator_wanted_workers 3.0\n"


@contextmanager
def serving(page: bytes, folder: Path) -> Iterator[str]:
    """Yields host:port of a server on an address that its certificate does not name."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, format: str, *given: object) -> None:
            pass

    make_certificates(folder)
    certificate, key = issue_certificate("coordinator", "main", ca=folder)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=str(folder / "ca.pem"))
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(certificate, key)
    with http.server.HTTPServer(("127.0.0.2", 0), Handler) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"127.0.0.2:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def read(address: str, folder: Path) -> int:
    files = [str(folder / name) for name in ("ca.pem", "admin.pem", "admin-key.pem")]
    return read_wanted_workers(address, *files, timeout_s=10)


def test_it_is_read_from_any_host_and_without_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with serving(METRICS, tmp_path) as address:
        assert read(address, tmp_path) == 3


@pytest.mark.parametrize("page", [b"", b"shoal_coordinator_wanted_workers many\n"])
def test_a_page_without_it_is_an_error_of_shoal(tmp_path: Path, page: bytes) -> None:
    with serving(page, tmp_path) as address, pytest.raises(errors.Unreachable, match=f"cannot read https://{address}"):
        read(address, tmp_path)


def test_the_certificate_is_checked(tmp_path: Path) -> None:
    make_certificates(tmp_path / "other")
    with (
        serving(METRICS, tmp_path / "mine") as address,
        pytest.raises(errors.Unreachable, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        read(address, tmp_path / "other")
