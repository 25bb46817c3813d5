"""A trainer's process as its daemon sees it: started, read from, stopped, and nothing of it left behind."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import IO

import structlog

from shoal._wire.limits import LOG_LINE_BYTES
from shoal_worker.messages import ENOUGH, LEAVE, Instructions, TrainerOutcome, TrainerReport, decode

_log = structlog.get_logger(__name__)

# -P: no folder is searched for modules but those that the instructions name.
TRAINER = (sys.executable, "-P", "-u", "-m", "shoal_worker")
# How long to read on after the process and its group are gone: only what left the group can still hold the pipes.
_DRAIN_S = 2.0


@dataclass(frozen=True, slots=True)
class TrainerExit:
    """How a process ended.

    Attributes:
        status: exit status; negative: the signal that killed it.
        outcome: what it said about its end; None: nothing.
    """

    status: int
    outcome: TrainerOutcome | None


class TrainerProcess:
    """One trainer, in a process group of its own.

    It lives as long as its standard input is open, so it cannot outlive this process, however this one ends.

    Args:
        instructions: `reports_fd` is filled in here.
        on_figures: is given its figures, on a thread of this object, as are the others.
        on_line: is given each line of its output, of at most LOG_LINE_BYTES.
        on_end: is called once, last, when the process is gone and all it wrote was read.
        command: what to run.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        instructions: Instructions,
        *,
        on_figures: Callable[[TrainerReport], None],
        on_line: Callable[[str], None],
        on_end: Callable[[TrainerExit], None],
        command: Sequence[str] = TRAINER,
    ) -> None:
        self._on_figures, self._on_line, self._on_end = on_figures, on_line, on_end
        self._outcome: TrainerOutcome | None = None  # set by the thread that reads figures, read after its end
        self._reaping = threading.Lock()  # guards _reaped: a signal may be sent only while the id is the process's
        self._reaped = False
        self._killer: threading.Timer | None = None
        figures, theirs = os.pipe()
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs,),
                start_new_session=True,
            )
        except OSError:
            os.close(figures)
            raise
        finally:
            os.close(theirs)
        self.pid = self._process.pid
        self._say(replace(instructions, reports_fd=theirs).to_line())
        assert self._process.stdout
        self._readers = [
            threading.Thread(target=self._read_output, args=(self._process.stdout,), name="output", daemon=True),
            threading.Thread(target=self._read_figures, args=(os.fdopen(figures, "rb"),), name="figures", daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._reap, name="trainer", daemon=True).start()

    def retire(self) -> None:
        """Asks it to finish the batch in hand and to leave its job. Returns at once."""
        self._say(LEAVE)

    def wind_up(self) -> None:
        """Asks it to finish the batch in hand and to be through. Returns at once."""
        self._say(ENOUGH)

    def stop(self, grace_s: float) -> None:
        """Asks it to end, and kills it if it is still there after `grace_s` seconds. Returns at once."""
        self._signal(signal.SIGTERM)
        self._killer = threading.Timer(grace_s, self._signal, [signal.SIGKILL])
        self._killer.daemon = True
        self._killer.start()

    def _say(self, line: bytes) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except (BrokenPipeError, ValueError):  # the latter where it is closed
            pass  # it is gone already, and _reap says how

    def _read_output(self, stream: IO[bytes]) -> None:
        with stream:
            while raw := stream.readline(LOG_LINE_BYTES):
                # One byte for each that is not UTF-8, so that no line grows over its limit.
                self._on_line(raw.decode(errors="replace").replace("\ufffd", "?").rstrip("\r\n"))

    def _read_figures(self, stream: IO[bytes]) -> None:
        with stream:
            for line in stream:
                try:
                    message = decode(line)
                except (ValueError, TypeError, KeyError):  # cut short by its death, or written by the program
                    _log.warning("a trainer's figures cannot be read", line=line[:200])
                    continue
                if isinstance(message, TrainerOutcome):
                    self._outcome = message
                else:
                    self._on_figures(message)

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # somebody else in this process has waited for it
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        self._signal(signal.SIGKILL)  # what the program started and left behind
        for reader in self._readers:
            reader.join(_DRAIN_S)
        with self._reaping:
            status = self._process.wait()
            self._reaped = True
        if self._killer:
            self._killer.cancel()
        assert self._process.stdin
        self._process.stdin.close()
        self._on_end(TrainerExit(status, self._outcome))

    def _signal(self, number: int) -> None:
        with self._reaping:
            if not self._reaped:
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
