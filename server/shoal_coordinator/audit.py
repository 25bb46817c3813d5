"""Audit log of control calls: who made each call, when, from where, and its outcome.

Each record is a JSON object on one line of a file, which is rotated. A thread writes the file, so calls never wait for
it. A metric counts the records that are lost. Records contain no secrets and no settings of jobs: the field `token` is
the id of a token.
"""

import datetime
import io
import json
import logging
import logging.handlers
import os
import queue
import threading
import time
from collections import Counter as CallCounts
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter

from shoal._limits import catalogue
from shoal._rpc import CallOutcome
from shoal._system import private_files

_log = structlog.get_logger(__name__)

# The calls that are recorded with any outcome, up to a number a second for each caller. The names lack the package of
# the services, which `AUDITED` has.
CONTROL_CALLS = frozenset(
    {
        "Coordinator/Register",
        "Coordinator/Leave",
        "Coordinator/Drain",
        "Jobs/Submit",
        "Jobs/Cancel",
        "Jobs/Drop",
        "Jobs/TakeCheckpoint",
        "Jobs/SetLearningRate",
        "Tokens/CreateToken",
        "Tokens/RevokeToken",
        "Tokens/GetLoginLink",
        "page/login",
        "page/logout",
    }
)
# Refused calls, with these statuses, are recorded for every method, up to a number a second.
_REFUSED = frozenset({"UNAUTHENTICATED", "PERMISSION_DENIED"})
# Fields of requests that say what a call was about. None of them is a secret or long.
_SUBJECT = ("job", "member", "name", "role", "token")
_MAX_TEXT = 200
_PACKAGE = "shoal.v1."
AUDITED = frozenset(f"{_PACKAGE}{call}" for call in CONTROL_CALLS)
# Bytes of a file before it is rotated, and the number of earlier files that are kept.
FILE_BYTES, FILES = 10 << 20, 5
_STOP = ""


class AuditLog:
    """The audit log of one coordinator. Thread-safe.

    Args:
        file: the file. If it is None, calls are counted in the metric, but not recorded.
        registry: gets the metrics.
        clock: returns Unix time in seconds.
    """

    def __init__(self, file: Path | None, registry: CollectorRegistry, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._records = Counter(
            "shoal_coordinator_audit_records_total",
            "Control calls, and calls that were refused because of their caller's identity, by their gRPC status.",
            ["call", "outcome"],
            registry=registry,
        )
        self._lost = Counter(
            "shoal_coordinator_audit_records_lost_total",
            "Records that the audit log has lost, because too many came at a time or the file could not be written.",
            registry=registry,
        )
        self._lock = threading.Lock()  # guards the next three
        self._second, self._left_out = 0, 0
        self._in_second: CallCounts[Hashable] = CallCounts()  # the calls in this second; see `_admit`
        self._lines: queue.Queue[str] = queue.Queue(catalogue.AUDIT_RECORDS.default)
        self._writer = _Writer(file, self._lost.inc) if file else None
        self._thread = threading.Thread(target=self._write, name="audit", daemon=True)
        if self._writer:
            self._thread.start()

    def note(self, outcome: CallOutcome) -> None:
        """Records a call if it is a control call, or was refused because of its caller's identity. Never waits."""
        call = outcome.call.removeprefix(_PACKAGE)
        if call not in CONTROL_CALLS and outcome.status not in _REFUSED:
            return
        self._records.labels(call, outcome.status).inc()
        if self._writer is None:
            return
        left_out = self._admit(outcome, call)
        if left_out is None:
            return
        record = {
            "time": datetime.datetime.fromtimestamp(self._clock(), datetime.UTC).isoformat(timespec="milliseconds"),
            "call": call,
            "outcome": outcome.status,
            "host": outcome.host,
            **_who(outcome),
            **_subject(outcome.request),
            **({"reason": outcome.reason[:_MAX_TEXT]} if outcome.reason else {}),
            **({"left_out": left_out} if left_out else {}),
        }
        try:
            self._lines.put_nowait(json.dumps(record))
        except queue.Full:
            self._lost.inc()

    def close(self) -> None:
        """Writes the records that wait, and closes the file."""
        if self._writer:
            self._lines.put(_STOP)
            self._thread.join()
            self._writer.close()

    def _admit(self, outcome: CallOutcome, call: str) -> int | None:
        """Returns how many calls were left out since the last record; None if this call is left out too.

        A caller that repeats a call leaves out neither other calls nor those of others, so it cannot hide them. Refused
        calls of unknown callers count together, because their number is not limited.
        """
        caller, host = outcome.caller, outcome.host
        who = (caller.name, caller.token, host) if caller else host
        refused = outcome.status in _REFUSED
        kind: Hashable = (bool(caller) and who, "refused") if refused else (who, call, outcome.status)
        most = catalogue.AUDIT_REFUSALS.default if refused else catalogue.AUDIT_CALLS.default
        with self._lock:
            second = int(self._clock())
            if second != self._second:
                self._second = second
                self._in_second.clear()
            self._in_second[kind] += 1
            if self._in_second[kind] > most:
                self._left_out += 1
                return None
            left_out, self._left_out = self._left_out, 0
        return left_out

    def _write(self) -> None:
        assert self._writer
        while (line := self._lines.get()) != _STOP:
            self._writer.emit(logging.LogRecord("audit", logging.INFO, "", 0, line, None, None))


class _Writer(logging.handlers.RotatingFileHandler):
    """Writes lines to a file that only this user can read."""

    def __init__(self, file: Path, on_lost: Callable[[], None]) -> None:
        self._on_lost, self._failing = on_lost, False
        super().__init__(file, maxBytes=FILE_BYTES, backupCount=FILES, encoding="utf-8", delay=True)

    def _open(self) -> io.TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        return open(os.open(self.baseFilename, flags, private_files.file_mode()), "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - by logging
        """Counts a record that was not written, and warns of the first one."""
        self._on_lost()
        if not self._failing:
            _log.warning("the audit log cannot be written; calls continue", file=self.baseFilename, exc_info=True)
        self._failing = True


def _who(outcome: CallOutcome) -> dict[str, str]:
    caller = outcome.caller
    return {"name": caller.name, "role": caller.role.value, "token": caller.token} if caller else {}


def _subject(request: Any) -> dict[str, dict[str, str]]:
    """Returns what a request was about: those of its fields that are short and not secret."""
    fields = request.DESCRIPTOR.fields_by_name if hasattr(request, "DESCRIPTOR") else {}
    found = {name: str(getattr(request, name))[:_MAX_TEXT] for name in _SUBJECT if name in fields}
    if "spec" in fields:  # a submission: its field `token` only identifies repeated requests
        found = {"job": str(request.spec.name)[:_MAX_TEXT]}
    return {"about": found} if found else {}


__all__ = ["AUDITED", "CONTROL_CALLS", "FILES", "FILE_BYTES", "AuditLog"]
