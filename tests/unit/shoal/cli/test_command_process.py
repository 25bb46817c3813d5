"""Processes of `shoal`: all that a person sees of a cluster that is not there, and of Ctrl-C."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

COMMAND = [sys.executable, "-m", "shoal", "jobs", "--coordinator"]

ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}


@pytest.fixture
def port() -> Iterator[socket.socket]:
    """Yields a port on which nobody listens yet."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        bound.settimeout(30)
        yield bound


def address(port: socket.socket) -> str:
    host, number = port.getsockname()
    return f"{host}:{number}"


def start(*arguments: str) -> subprocess.Popen[str]:
    # A session of POSIX of its own: processes that a script starts in the background may ignore SIGINT.
    return subprocess.Popen(
        [*COMMAND, *arguments],
        env={**ENVIRONMENT, "COLUMNS": "400"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def test_a_process_writes_its_own_lines_alone_and_ends_quietly_with_ctrl_c(port: socket.socket) -> None:
    with start(address(port), "--retry-for", "0.1") as refused, socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        with start(address(silent), "--retry-for", "20") as interrupted:
            try:
                connection, _ = silent.accept()  # the command waits for an answer from now on
                interrupted.send_signal(signal.SIGINT)
                assert (interrupted.communicate(timeout=30), interrupted.returncode) == (("", ""), 130)
                connection.close()
            finally:
                interrupted.kill()
        out, err = refused.communicate(timeout=30)
    assert (out, refused.returncode) == ("", 3)
    [line] = err.splitlines()
    assert line.startswith(f"error: the coordinator at {address(port)} did not answer within 0.1 s (")
