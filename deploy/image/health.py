"""The image's HEALTHCHECK: asks the role of this container whether it is healthy.

With SHOAL_TLS_CERT, it asks over TLS. It does not check the certificate, because it calls its own container.

Exits with 0 if /healthz answers 200. Otherwise it exits with 1 and prints the reason. Docker runs this script every few
seconds in every container, on cores that also train. So it imports little: `python3 -I -S health.py` takes 10 ms.
"""

import os
import socket
import sys


def reply(listen: str, timeout_s: float = 2.0) -> bytes:
    """Returns the answer of /healthz: status line, headers and body, at most 64 KiB.

    Args:
        listen: the value of SHOAL_METRICS_LISTEN. An address of all interfaces stands for this host.
        timeout_s: limit in seconds for the connection, and for each read.

    Raises:
        OSError: there is no answer.
        ValueError: `listen` is not host:port.
    """
    host, _, port = listen.rpartition(":")
    host = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "[::]": "::1"}.get(host, host.strip("[]"))  # noqa: S104
    received = b""
    with socket.create_connection((host, int(port)), timeout_s) as plain, encrypted(plain) as connection:
        connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        while len(received) < 65536 and (more := connection.recv(4096)):
            received += more
    return received


def encrypted(connection: socket.socket) -> socket.socket:
    """Returns the connection with TLS, if the role uses it."""
    if not os.environ.get("SHOAL_TLS_CERT"):
        return connection
    import ssl  # noqa: PLC0415 - takes as long as the rest

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context.wrap_socket(connection)


def main() -> int:
    """Checks the health, and returns the exit status."""
    listen = os.environ.get("SHOAL_METRICS_LISTEN", "")
    try:
        answer = reply(listen)
    except (OSError, ValueError) as error:
        print(f"no answer from /healthz at SHOAL_METRICS_LISTEN={listen}: {error}")  # noqa: T201
        return 1
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.split(b" ", 2)[1:2] == [b"200"]:
        return 0
    print(body.decode(errors="replace")[:1000] or head.decode(errors="replace")[:100])  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main())
