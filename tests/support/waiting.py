"""Helpers that wait for a condition with a deadline, in place of a sleep."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path


def wait_until(condition: Callable[[], object], *, timeout_s: float = 20.0, what: str = "the condition") -> None:
    """Returns once `condition()` holds. Raises AssertionError if it does not hold within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        pause.wait(0.01)


def stop_process(pid: int) -> None:
    """Stops a process by SIGSTOP, and waits until all its threads are stopped.

    The first thread that runs again stops the others. On a busy machine they run on until then, for many milliseconds.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = Path(f"/proc/{pid}/task")
    wait_until(lambda: all(_state(it) == "T" for it in threads.glob("*/stat")), what=f"the stop of process {pid}")


def _state(thread: Path) -> str:
    return thread.read_text().rpartition(") ")[2][0]
