"""Supervisor of the processes of one system: it starts a process again when it has ended, as Kubernetes does."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

# A process that lived for a shorter time than this is started again after a pause.
_QUICK_S, _PAUSE_S = 2.0, 1.0
_POLL_S = 0.02


class _Process:
    """One supervised process."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], folder: Path) -> None:
        self.name, self._command, self._env, self._log = name, command, env, folder / f"{name}.log"
        self.starts = 0
        self._ended_at: float | None = None
        self.start()

    def start(self) -> None:
        with self._log.open("ab") as log:
            self.popen = subprocess.Popen(
                self._command, env=self._env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self._started_at, self._ended_at = time.monotonic(), None
        self.starts += 1

    def check(self, now: float) -> None:
        """Starts the process again if it has ended."""
        if self.popen.poll() is None:
            return
        if self._ended_at is None:
            self._ended_at = now
        quick = self._ended_at - self._started_at < _QUICK_S
        if now - self._ended_at >= (_PAUSE_S if quick else 0):
            self.start()

    def end(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
        self.popen.wait()


class Supervisor:
    """Starts processes, and starts each one again at once when it has ended.

    Use it in a `with` statement, whose end kills all of its processes.

    Args:
        folder: folder for the processes' logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()  # guards the processes
        self._processes: dict[str, _Process] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor")

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        """Starts a process.

        Args:
            name: its name, by which it is killed.
            command: program and arguments.
            env: variables to add to those of this process.
        """
        combined = {**os.environ, **(env or {})}
        combined.pop("PYTHONDONTWRITEBYTECODE", None)  # each start would compile all that it imports
        with self._lock:
            self._processes[name] = _Process(name, command, combined, self._folder)

    def kill(self, name: str) -> None:
        """Kills a process by SIGKILL. It is started again."""
        with self._lock:
            popen = self._processes[name].popen
            if popen.poll() is None:
                popen.send_signal(signal.SIGKILL)

    def end(self, name: str) -> None:
        """Kills a process, which is not started again."""
        with self._lock:
            self._processes.pop(name).end()

    def restarts(self) -> dict[str, int]:
        """Returns how often each process was started again."""
        with self._lock:
            return {name: process.starts - 1 for name, process in self._processes.items()}

    def __enter__(self) -> "Supervisor":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        for process in self._processes.values():
            process.end()

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            with self._lock:
                for process in self._processes.values():
                    process.check(time.monotonic())
