"""TLS probe of a process that does not answer a first call."""

import gc
import select
import socket
import struct

import pytest

from shoal._rpc.tls_probe import tls_failure
from shoal._security import AccessRole


def test_a_connection_that_was_reset_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest makes an error of the warning about a socket that is not closed."""
    connect = socket.create_connection

    def reset(address: tuple[str, int], timeout: float) -> socket.socket:
        connection = connect(address, timeout)
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()
        resets = select.poll()
        resets.register(connection, select.POLLIN)
        assert resets.poll(10_000)
        return connection

    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setattr(socket, "create_connection", reset)
        assert tls_failure(f"127.0.0.1:{listener.getsockname()[1]}", None, AccessRole.ADMIN) is None
    gc.collect()
