"""Runner of a process that prints one JSON line: it limits the time, returns the line, and ends all child processes.

`harness` decides what to run, and how often.
"""

import ctypes
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import psutil

Line = dict[str, Any]

# Seconds that the processes of a script may take to end after the script itself has ended.
GRACE_S = 10.0
_TAIL_BYTES = 2_000
_PR_SET_CHILD_SUBREAPER = 36


class Failed(Exception):
    """A script printed no result. The message has the reason."""


def adopt_orphans() -> None:
    """Makes this process adopt every descendant whose parent has ended, so that `run` finds them (Linux)."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def run(command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout_s: float) -> Line:
    """Runs a script with a temporary folder of its own, and returns the last JSON object that it printed.

    The script may end with any status after it has printed the object. Then all its processes are killed: its process
    group, and all new descendants of this process (see `adopt_orphans`). Only one thread may call this at a time.

    Args:
        command: interpreter, script and arguments.
        env: variables to add to this process's environment.
        timeout_s: seconds after which the script counts as hanging.

    Returns:
        The object. If processes had to be killed, their number is added as `left_running`.

    Raises:
        Failed: the script hung, could not be started, or printed no object.
    """
    before = _descendants()
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        tempfile.TemporaryDirectory(prefix="bench-", ignore_cleanup_errors=True) as folder,
    ):
        try:
            script = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "TMPDIR": folder, **(env or {})},
                start_new_session=True,
            )
        except OSError as error:
            raise Failed(f"could not be started: {error}") from None
        try:
            try:
                status = script.wait(timeout_s)
            except subprocess.TimeoutExpired:
                raise Failed(f"gave no figure in {timeout_s:g} s{_said(err)}") from None
            line = last_object(_text(out))
            if line is None:
                raise Failed(f"ended with status {status} and printed no figure{_said(err)}")
            _await_end(before)
        finally:
            killed = _end(script, before)
    return {**line, "left_running": killed} if killed else line


def last_object(text: str) -> Line | None:
    """Returns the last line that is a JSON object."""
    for line in reversed(text.splitlines()):
        with suppress(ValueError):
            found = json.loads(line)
            if isinstance(found, dict):
                return found
    return None


def _descendants() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


def _await_end(before: set[psutil.Process]) -> None:
    deadline = time.monotonic() + GRACE_S
    while (left := _descendants() - before) and time.monotonic() < deadline:
        psutil.wait_procs(left, timeout=0.1)


def _end(script: "subprocess.Popen[bytes]", before: set[psutil.Process]) -> int:
    """Kills the remaining processes of a script, and returns their number."""
    if script.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)  # our own: it leads a session that we began
        script.wait()
    killed = 0
    while left := [process for process in _descendants() - before if process.is_running()]:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                killed += process.status() != psutil.STATUS_ZOMBIE
                process.kill()
        psutil.wait_procs(left, timeout=5)
    return killed


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _said(file: IO[bytes]) -> str:
    text = _text(file)[-_TAIL_BYTES:].strip()
    return f"; it said:\n{text}" if text else ""
