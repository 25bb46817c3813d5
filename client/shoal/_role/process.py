"""A role as a child process: start, readiness, supervision, stop and log.

Error messages quote the last lines of the log.
"""

import json
import os
import queue
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from shoal import errors
from shoal._role.fork_server import ForkServer, tail

_END_S = 20.0  # a killed process ends at once, unless its memory is being written to a slow disk


class RoleProcess:
    """A child process `shoal coordinator`, `server` or `worker`, which ends when this process ends in any way.

    Its standard input is a pipe from this process, and the role stops at the end of it. It has a session of its own, so
    that Ctrl-C reaches only this process, which stops the roles in order.

    Args:
        role: coordinator, server or worker.
        index: its number among the processes of its role.
        flags: options of its command.
        fork_server: starts the process, with the environment of the fork server.
        log_dir: the folder for NAME.log. None means an unnamed temporary file.
        show_log: whether it writes to the standard error of this process instead.

    Attributes:
        name: the member id, such as "server-0".
        arguments: its command line, after `shoal`.
        address: host:port that it serves at, once it is ready. Empty for a worker.
        metrics: host:port of its /metrics, once it is ready.
        page: URL of a coordinator's page, once it is ready. Empty if it has none.
    """

    def __init__(
        self,
        role: str,
        index: int,
        flags: Sequence[str],
        *,
        fork_server: ForkServer,
        log_dir: Path | None = None,
        show_log: bool = False,
    ) -> None:
        self.role, self.index = role, index
        self.name = role if role == "coordinator" else f"{role}-{index}"
        self.address = self.metrics = self.page = ""
        self._log = None if show_log else _open_log(log_dir, self.name)
        self._ready: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.arguments = (role, *flags, "--supervised")
        self._fork_server = fork_server
        self._process = fork_server.start(self.name, self.arguments, self._log)
        self._reader = threading.Thread(target=self._read_output, name=f"output of {self.name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id; 0 until the process is made."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal, or None while the process runs."""
        return self._process.poll()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the role reports that it is ready.

        Raises:
            StartFailed: the process ended, or was not ready in time. The message has the end of its log.
        """
        deadline = time.monotonic() + timeout_s
        self._process.wait_started(timeout_s)
        try:
            ready = self._ready.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise errors.StartFailed(
                f"{self.name} was not ready in time{self._log_excerpt()}", role=self.role, name=self.name
            ) from None
        if ready is None:
            code = self._process.wait(_END_S)
            raise errors.StartFailed(
                f"{self.name} ended with exit status {code} before it was ready{self._log_excerpt()}",
                role=self.role,
                name=self.name,
            )
        self.address, self.metrics, self.page = ready["address"], ready["metrics"], ready.get("page", "")

    def tail(self) -> str:
        """Returns the last lines of its log, at most 4 KiB, or an empty string if `show_log` is set."""
        return tail(self._log)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal, such as SIGKILL, SIGSTOP or SIGCONT. This has no effect if the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kills the process and waits for its end."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(_END_S)

    def ask_to_stop(self) -> None:
        """Asks the process to stop gracefully, without waiting."""
        self._process.stdin.close()
        self._process.send_signal(signal.SIGTERM)

    def reap(self, timeout_s: float) -> None:
        """Waits for the end of the process, kills it after `timeout_s` seconds, and releases its resources."""
        try:
            self._process.wait(timeout_s)
        except TimeoutError:
            self.kill()
        self._process.close()
        # The reader ends with the role, unless a grandchild of a user's program holds the pipe open.
        self._reader.join(timeout=1.0)
        if not self._reader.is_alive():
            self._process.stdout.close()
        if self._log:
            self._log.close()

    def _log_excerpt(self) -> str:
        text = self.tail() or self._fork_server.tail()
        return f"; end of its log:\n{text}" if text else "; see its log"

    def _read_output(self) -> None:
        """Waits for the ready line, then forwards the output of programs, so that a full pipe never blocks a role."""
        ready = False
        for line in self._process.stdout:
            if not ready and line.startswith(b'{"role":'):
                ready = True
                self._ready.put(json.loads(line))
            else:
                os.write(self._log.fileno() if self._log else 2, line)
        self._ready.put(None)


def _open_log(folder: Path | None, name: str) -> IO[bytes]:
    if folder is None:
        return tempfile.TemporaryFile(prefix="shoal-")
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{name}.log").open("a+b")
