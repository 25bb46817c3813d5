"""Handle of a trainer in the daemon: starts it under a guard, reads its output, and stops it with all its children."""

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
from shoal_worker.isolation import KILL, TrainerIsolation
from shoal_worker.messages import (
    LEAVE,
    STOP_AFTER_BATCH,
    Instructions,
    TicketReply,
    TicketWanted,
    TrainerOutcome,
    TrainerReport,
    decode,
)

_log = structlog.get_logger(__name__)

# -P: Python searches for modules only in the folders of the instructions.
TRAINER = (sys.executable, "-P", "-u", "-m", "shoal_worker")
# Seconds to read on after the guard has ended. Only processes that it could not end can still hold the pipes.
_DRAIN_S = 2.0
# Limit of a trainer's message. A program can write to the pipe of the reports.
_MESSAGE_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TrainerExit:
    """How a process ended.

    Attributes:
        status: exit status; negative if a signal killed it.
        outcome: its last message; None if it sent none.
    """

    status: int
    outcome: TrainerOutcome | None


class TrainerProcess:
    """One trainer and its guard, each in a session of its own.

    The guard ends the trainer, and all that it started, when the lifeline closes, so no process outlives this one. The
    trainer also ends when its standard input closes. All callbacks run on threads of this object.

    Args:
        instructions: the trainer's instructions; `reports_fd` is set here.
        isolation: the trainer's environment, limits and user.
        on_report: called with each report.
        on_ticket_wanted: called with each request for a ticket. It returns the reply to the trainer.
        on_line: called with each line of output, of at most LOG_LINE_BYTES.
        on_end: called once and last, after the process has ended and all of its output was read.
        command: the command to run.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        instructions: Instructions,
        isolation: TrainerIsolation,
        *,
        on_report: Callable[[TrainerReport], None],
        on_ticket_wanted: Callable[[TicketWanted], TicketReply],
        on_line: Callable[[str], None],
        on_end: Callable[[TrainerExit], None],
        command: Sequence[str] = TRAINER,
    ) -> None:
        self._on_report, self._on_line, self._on_end = on_report, on_line, on_end
        self._on_ticket_wanted = on_ticket_wanted
        self._outcome: TrainerOutcome | None = None  # set by the thread that reads reports
        self._reaping = threading.Lock()  # guards _reaped: after reaping, another process may have the id
        self._reaped = False
        self._killer: threading.Timer | None = None
        self._guarding = threading.Lock()  # guards _lifeline
        self._clean_up: Callable[[], object] = int  # called after the guard has ended; nothing to do yet
        reports, theirs = os.pipe()
        lifeline, self._lifeline = os.pipe()
        try:
            guarded = isolation.guarded(command, lifeline, theirs)
            self._clean_up = guarded.clean_up
            self._process = subprocess.Popen(  # noqa: S603 - the command is ours
                guarded.words,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=guarded.environment,
                pass_fds=(lifeline, theirs),
                start_new_session=True,
            )
        except OSError:
            os.close(reports)
            self._cut_lifeline()
            self._clean_up()
            raise
        finally:
            os.close(theirs)
            os.close(lifeline)
        self.pid = self._process.pid
        self._instruct(replace(instructions, reports_fd=theirs))
        assert self._process.stdout
        streams = (self._process.stdout, os.fdopen(reports, "rb"))
        self._readers = [
            threading.Thread(target=self._read_output, args=streams[:1], name="output", daemon=True),
            threading.Thread(target=self._read_reports, args=streams[1:], name="reports", daemon=True),
        ]
        try:
            for reader in self._readers:
                reader.start()
            threading.Thread(target=self._reap, name="trainer", daemon=True).start()
        except RuntimeError as error:  # the limit on threads is reached
            self._cut_lifeline(KILL)
            self._wait()
            for reader, stream in zip(self._readers, streams, strict=True):
                if not reader.ident:  # otherwise the reader closes it
                    stream.close()
            raise OSError(f"cannot watch the trainer: {error}") from error

    def leave_after_batch(self) -> None:
        """Asks the trainer to finish its batch and to leave the job. Returns at once."""
        self._send(LEAVE)

    def stop_after_batch(self) -> None:
        """Asks the trainer to finish its batch and the job. Returns at once."""
        self._send(STOP_AFTER_BATCH)

    def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and SIGKILL to all of its processes after `grace_s` seconds. Returns at once."""
        self._signal(signal.SIGTERM)
        self._killer = threading.Timer(grace_s, self._cut_lifeline, [KILL])
        self._killer.daemon = True
        self._killer.start()

    def _instruct(self, instructions: Instructions) -> None:
        self._send(instructions.to_line())
        assert self._process.stdin
        # A trainer that does not read its later messages must not block the threads that send them.
        os.set_blocking(self._process.stdin.fileno(), False)

    def _send(self, line: bytes) -> None:
        assert self._process.stdin
        try:
            self._process.stdin.write(line)
            self._process.stdin.flush()
        except BlockingIOError:
            _log.warning("a trainer does not read its messages; one is lost", message=line.split(b" ")[0][:40])
        except (BrokenPipeError, ValueError):  # ValueError: the pipe is closed
            pass  # the process has ended; _reap reports it

    def _read_output(self, stream: IO[bytes]) -> None:
        with stream:
            while raw := stream.readline(LOG_LINE_BYTES):
                # Each invalid byte becomes one byte, so that no line exceeds its limit.
                self._on_line(raw.decode(errors="replace").replace("\ufffd", "?").rstrip("\r\n"))

    def _read_reports(self, stream: IO[bytes]) -> None:
        with stream:
            while line := stream.readline(_MESSAGE_BYTES):
                try:
                    message = decode(line)
                # Cut off by a crash, or written by the program.
                except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    _log.warning("invalid message from a trainer", line=line[:200])
                    continue
                match message:
                    case TrainerOutcome():
                        self._outcome = message
                    case TicketWanted():
                        self._send(self._on_ticket_wanted(message).to_line())
                    case TrainerReport():
                        self._on_report(message)

    def _reap(self) -> None:
        with suppress(ChildProcessError):  # already waited for elsewhere in this process
            os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        for reader in self._readers:
            reader.join(_DRAIN_S)
        status = self._wait()
        if self._killer:
            self._killer.cancel()
        self._on_end(TrainerExit(status, self._outcome))

    def _wait(self) -> int:
        with self._reaping:
            status = self._process.wait()
            self._reaped = True
        self._cut_lifeline()
        self._clean_up()
        assert self._process.stdin
        with suppress(BrokenPipeError, BlockingIOError):  # it still buffers what the process did not read
            self._process.stdin.close()
        return status

    def _signal(self, number: int) -> None:
        """Sends a signal to the guard, which passes SIGTERM on to the trainer's process group."""
        with self._reaping:
            if not self._reaped:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, number)

    def _cut_lifeline(self, last: bytes = b"") -> None:
        """Writes to the lifeline and closes it. The guard then ends the trainer; after `KILL`, at once."""
        with self._guarding, suppress(BrokenPipeError):
            lifeline, self._lifeline = self._lifeline, -1
            if lifeline >= 0:
                with os.fdopen(lifeline, "wb", buffering=0) as pipe:
                    pipe.write(last)
