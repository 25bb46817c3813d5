"""TLS probe: finds out whether and why TLS made a first call fail. gRPC only says that the connection was closed."""

import socket
import ssl
from contextlib import suppress
from typing import TYPE_CHECKING

from shoal import errors
from shoal._rpc.channels import parse_address
from shoal._security import AccessRole, explained, role_name

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles

_PROBE_S = 1.0
_USES_TLS = (
    "it uses TLS, and this process does not; give --tls-ca, --tls-cert and --tls-key, or SHOAL_TLS_CA, SHOAL_TLS_CERT "
    "and SHOAL_TLS_KEY"
)


def tls_failure(address: str, tls: "TlsFiles | None", role: AccessRole) -> errors.Unauthenticated | None:
    """Returns why TLS with a process fails, or None if the reason why it does not answer is another one.

    The function opens a connection of its own, and waits for at most a second.

    Args:
        address: host:port of the process.
        tls: TLS settings of this process. None means that it uses no TLS.
        role: access role that the certificate of the other process must name.
    """
    host, port = parse_address(address)
    with suppress(OSError), socket.create_connection((host.strip("[]"), port), _PROBE_S) as connection:
        if why := _refusal(connection, tls, role) if tls else _hint(connection):
            return errors.Unauthenticated(f"no connection to {address}: {why}", address=address)
    return None


def _hint(connection: socket.socket) -> str:
    """Returns what to do if the other end uses TLS, or an empty string."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # nothing is sent
    context.minimum_version = ssl.TLSVersion.TLSv1_3  # a server then asks for a certificate after the handshake
    try:
        _shake_hands(connection, context)
    except ssl.SSLError as error:
        return _USES_TLS if "ALERT" in (error.reason or "") else ""
    return _USES_TLS


def _refusal(connection: socket.socket, tls: "TlsFiles", role: AccessRole) -> str:
    try:
        _shake_hands(connection, tls.current().lane_client, role_name(role))
    except ssl.SSLError as error:
        return explained(error)
    except ConnectionError:
        return explained(ssl.SSLEOFError())
    return ""


def _shake_hands(connection: socket.socket, context: ssl.SSLContext, name: str | None = None) -> None:
    """Makes a TLS handshake. `wrap_socket` does not close a connection that the other end has reset already."""
    received, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(received, sent, server_hostname=name)
    while True:
        done = True
        try:
            tls.do_handshake()
        except ssl.SSLWantReadError:
            done = False
        except ssl.SSLError:
            with suppress(OSError):
                connection.sendall(sent.read())  # the alert
            raise
        connection.sendall(sent.read())
        if done:
            return
        if data := connection.recv(1 << 14):
            received.write(data)
        else:
            received.write_eof()


__all__ = ["tls_failure"]
