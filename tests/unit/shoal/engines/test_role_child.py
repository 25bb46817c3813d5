"""Role as a child process: it is ready, it stops, and it says why it does not start."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shoal._engines import RoleChild
from support.waiting import wait_until

COORDINATOR = ["coordinator", "--listen", "127.0.0.1:0", "--page-listen", "", "--store", "memory", "--supervised"]


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path)}


def test_a_role_stops_although_signals_are_blocked_here(tmp_path: Path) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        child = RoleChild(COORDINATOR, environment(tmp_path))
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    wait_until(lambda: child.ready, timeout_s=60, what="the coordinator")
    assert child.ready
    assert child.ready["pid"] == child.pid
    assert 0 < child.ready_at <= time.monotonic()
    child.stop(30)
    assert child.wait(0) == 0, "it was killed"


def test_a_role_leaves_at_a_signal(tmp_path: Path) -> None:
    child = RoleChild(COORDINATOR, environment(tmp_path))
    wait_until(lambda: child.ready, timeout_s=60, what="the coordinator")
    child.leave(30)
    assert child.wait(0) == 0


def test_a_role_that_cannot_start_ends(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    child = RoleChild(["coordinator", "--nonsense"], environment(tmp_path))
    assert child.wait(60) == 2
    assert child.ready is None
    assert "--nonsense" in capfd.readouterr().err


def test_the_end_of_a_log_is_short(tmp_path: Path) -> None:
    script = "import sys; sys.stderr.write('x' * 10_000 + 'the end'); sys.stderr.flush()\n"
    script += "from shoal._engines import log_tail; print(log_tail(), end='')"
    with open(tmp_path / "log", "wb") as log:
        ran = subprocess.run([sys.executable, "-c", script], stderr=log, stdout=subprocess.PIPE, text=True, check=True)
    assert len(ran.stdout) == 2048
    assert ran.stdout.endswith("xthe end")
