"""One role as a child process: started, found ready, watched and ended, with its log kept for when it fails."""

import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from shoal import errors

_TAIL_BYTES = 4096


class RoleProcess:
    """A `shoal coordinator`, `server` or `worker` that ends when this process does, however this one ends.

    Its standard input is a pipe of ours: the role ends with it. It is in a session of its own, so that Ctrl-C reaches
    only us, and we end the roles in their order.

    Args:
        role: coordinator, server or worker.
        index: its number among those of its role.
        flags: of its command.
        env: its environment.
        log_dir: where it writes NAME.log. None: to a file without a name, which goes with the processes.
        show_log: it writes to our standard error instead.

    Attributes:
        name: such as "server-0"; the member id.
        address: host:port it serves at, once it is ready; a worker's is empty.
        metrics: host:port of its /metrics, once it is ready.
        page: the URL of a coordinator's page, once it is ready; empty: it has none.
    """

    def __init__(
        self,
        role: str,
        index: int,
        flags: Sequence[str],
        *,
        env: Mapping[str, str],
        log_dir: Path | None = None,
        show_log: bool = False,
    ) -> None:
        self.role, self.index = role, index
        self.name = role if role == "coordinator" else f"{role}-{index}"
        self.address = self.metrics = self.page = ""
        self._log = None if show_log else _open_log(log_dir, self.name)
        self._ready: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        # -P: what lies in the working directory is no module of a role's.
        self._process = subprocess.Popen(  # noqa: S603 - our own command line
            [sys.executable, "-P", "-m", "shoal", role, *flags, "--supervised"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=dict(env),
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read_output, name=f"output of {self.name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the role says that it is ready.

        Raises:
            StartFailed: it ended before, or took longer; the message has the end of its log.
        """
        try:
            ready = self._ready.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            raise errors.StartFailed(
                f"{self.name} was not ready in time{self._said()}", role=self.role, name=self.name
            ) from None
        if ready is None:
            code = self._process.wait()
            raise errors.StartFailed(
                f"{self.name} ended with exit status {code} before it was ready{self._said()}",
                role=self.role,
                name=self.name,
            )
        self.address, self.metrics, self.page = ready["address"], ready["metrics"], ready.get("page", "")

    def tail(self) -> str:
        """The last lines of its log, at most 4 KiB; empty where the log is shown elsewhere."""
        if self._log is None:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        # pread leaves the offset alone, which the role's own writes share.
        text = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return text.decode(errors="replace").strip()

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal: SIGKILL, SIGSTOP, SIGCONT; nothing if the process has ended."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Ends it as a crash would, and waits until it is gone."""
        self._process.kill()
        self._process.wait()

    def ask_to_stop(self) -> None:
        """Asks it to end in good order, and does not wait."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.terminate()

    def reap(self, timeout_s: float) -> None:
        """Waits for its end, kills it when that takes longer, and frees what this process holds for it."""
        assert self._process.stdin
        assert self._process.stdout
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process.stdin.close()
        # Ends with the role; a grandchild of a user's program may hold the pipe open, and is not waited for.
        self._reader.join(timeout=1.0)
        if not self._reader.is_alive():
            self._process.stdout.close()
        if self._log:
            self._log.close()

    def _said(self) -> str:
        tail = self.tail()
        return f"; it said:\n{tail}" if tail else "; see its log"

    def _read_output(self) -> None:
        """Waits for the ready line, then passes on what programs print, so that a full pipe never stops a role."""
        assert self._process.stdout
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
