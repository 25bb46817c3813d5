"""Trainer process: its end is always reported."""

import os
import queue
import sys
import threading

import pytest

from shoal_worker.messages import Instructions
from shoal_worker.trainer_process import TrainerExit, TrainerProcess

INSTRUCTIONS = Instructions(
    coordinator="127.0.0.1:1",
    job="digits",
    worker="worker-0",
    incarnation=1,
    assignment=1,
    device="cpu",
    device_memory_limit=0,
    paths=(),
    allow_programs=(),
    retry_for_s=1,
    reports_fd=-1,
)


class Started:
    """A process that runs `code`, its lines of output, and its end."""

    def __init__(self, code: str) -> None:
        self.lines: queue.Queue[str] = queue.Queue()
        self.ends: queue.Queue[TrainerExit] = queue.Queue()
        self.process = TrainerProcess(
            INSTRUCTIONS,
            on_report=lambda _: None,
            on_line=self.lines.put,
            on_end=self.ends.put,
            command=(sys.executable, "-u", "-S", "-c", code),
        )


def test_the_end_of_a_trainer_that_closed_its_input_is_reported() -> None:
    started = Started("import os, signal; os.close(0); print('closed'); signal.pause()")
    assert started.lines.get(timeout=20) == "closed"
    started.process.leave_after_batch()  # fails, and stays in the buffer of the pipe
    started.process.stop(grace_s=20)
    assert started.ends.get(timeout=20) == TrainerExit(-15, None)


def test_a_trainer_that_cannot_be_watched_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon can start no thread, as when the limit on threads is reached."""
    killed: list[int] = []
    kill = os.killpg

    def record(group: int, number: int) -> None:
        killed.append(group)
        kill(group, number)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(os, "killpg", record)
    with pytest.raises(OSError, match="cannot watch the trainer: can't start new thread"):
        Started("import signal; signal.pause()")
    with pytest.raises(ChildProcessError):  # it was reaped
        os.waitpid(killed[0], os.WNOHANG)
