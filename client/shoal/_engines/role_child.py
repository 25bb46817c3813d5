"""A role as a child process of a process of an engine, with the log of that process."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

_END_S = 20.0  # a killed process ends at once, unless its memory is being written to a slow disk
_TAIL_BYTES = 2048


class RoleChild:
    """A child process `shoal ROLE`. It ends when this process ends, because its standard input is a pipe from here.

    It writes to the standard error of this process. It has a session of its own, so that a signal to the process group
    of this process does not reach it.

    Args:
        arguments: its command line, after `shoal`.
        environment: its environment variables.

    Attributes:
        ready: what it reported when it was ready: address, metrics, page and pid. None before.
        ready_at: when it reported that, in seconds of the monotonic clock.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.ready: dict[str, Any] | None = None
        self.ready_at = 0.0
        # A child inherits the mask of this thread, and an engine may block signals in its threads, as Ray does SIGINT.
        blocked = signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                [sys.executable, "-P", "-m", "shoal", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        threading.Thread(target=self._read_output, name="output of the role", daemon=True).start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask_to_leave(self) -> None:
        """Asks it to leave the cluster gracefully, without waiting. This has no effect if it has ended."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int | None:
        """Returns its exit status when it ends, or None if it still runs after `timeout_s` seconds."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        self._close_input()
        return status

    def leave(self, timeout_s: float) -> None:
        """Lets it leave the cluster gracefully, for at most `timeout_s` seconds, and ends it."""
        self.ask_to_leave()
        if self.wait(timeout_s) is None:
            self.stop(0)

    def stop(self, timeout_s: float) -> None:
        """Stops it, and kills it after `timeout_s` seconds."""
        self._close_input()
        if self.wait(timeout_s) is None:
            self._process.kill()
            self.wait(_END_S)

    def _close_input(self) -> None:
        assert self._process.stdin
        with suppress(OSError):
            self._process.stdin.close()

    def _read_output(self) -> None:
        """Waits for the ready line, then forwards the output of programs, so that a full pipe never blocks the role."""
        assert self._process.stdout
        with self._process.stdout as output:
            for line in output:
                if self.ready is None and line.startswith(b'{"role":'):
                    self.ready_at = time.monotonic()
                    self.ready = json.loads(line)
                else:
                    os.write(2, line)


def log_tail() -> str:
    """Returns the end of this process's standard error if that is a file, as in a process of Ray, else nothing."""
    with suppress(OSError):
        file = Path("/proc/self/fd/2").resolve()
        if file.is_file():
            with file.open("rb") as opened:
                opened.seek(max(0, file.stat().st_size - _TAIL_BYTES))
                return opened.read(_TAIL_BYTES).decode(errors="replace").strip()
    return ""


__all__ = ["RoleChild", "log_tail"]
