"""Audit log of the calls that a role receives: who made each call, when, from where, and its outcome.

`shoal._security.audited_calls` says which calls are recorded. Each record is a JSON object on one line of a file, which
is rotated. A thread writes the file, so calls never wait for it. A metric counts the records that are lost. Records
contain no secrets and no settings of jobs: the field `token` is the id of a token.
"""

import datetime
import fcntl
import io
import json
import logging
import logging.handlers
import os
import queue
import threading
import time
from collections import Counter as CallCounts
from collections import OrderedDict
from collections.abc import Callable, Hashable
from itertools import islice
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry, Counter

from shoal._limits import catalogue
from shoal._rpc import CallOutcome
from shoal._security import AUDITED, REFUSALS, Audited
from shoal._system import private_files

_log = structlog.get_logger(__name__)

# Fields of requests that say what a call was about. None of them is a secret or long.
_SUBJECT = ("job", "group", "member", "worker", "name", "role", "token", "generation", "number", "cut")
# Names of a call's workers that are recorded.
_MOST_WORKERS = 8
_MAX_TEXT = 200
_PACKAGE = "shoal.v1."
_AUDITED = {call.removeprefix(_PACKAGE): audited for call, audited in AUDITED.items()}
# Seconds after which a call that a waiting process repeats is recorded again.
AGAIN_S = 3_600.0
# Bytes of a file before it is rotated, and the number of earlier files that are kept.
FILE_BYTES, FILES = 10 << 20, 5
# The value of the option that turns the log off.
NO_LOG = "none"
_STOP = ""


class AuditLog:
    """The audit log of one role. Thread-safe.

    Args:
        role: coordinator or server; the metrics have its name.
        file: the file. If it is None, calls are counted in the metric, but not recorded.
        registry: gets the metrics.
        clock: returns Unix time in seconds.

    Raises:
        BadRequest: `SHOAL_FILE_ACCESS` has an unknown value.
    """

    def __init__(
        self, role: str, file: Path | None, registry: CollectorRegistry, clock: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._records = Counter(
            f"shoal_{role}_audit_records_total",
            "Control calls, and calls that were refused because of their caller's identity, by their gRPC status.",
            ["call", "outcome"],
            registry=registry,
        )
        self._lost = Counter(
            f"shoal_{role}_audit_records_lost_total",
            "Records that the audit log has lost, because too many came at a time or the file could not be written.",
            registry=registry,
        )
        self._lock = threading.Lock()  # guards the next four
        self._second, self._left_out = 0, 0
        self._in_second: CallCounts[Hashable] = CallCounts()  # the calls in this second; see `_admit`
        self._first: OrderedDict[Hashable, float] = OrderedDict()  # when such calls were recorded, the earliest first
        self._lines: queue.Queue[str] = queue.Queue(catalogue.AUDIT_RECORDS.default)
        self._writer = _Writer(file, self._lost.inc) if file else None
        self._thread = threading.Thread(target=self._write, name="audit", daemon=True)
        if self._writer:
            self._thread.start()

    def note(self, outcome: CallOutcome) -> None:
        """Records a call if it is a control call, or was refused because of its caller's identity. Never waits."""
        call = outcome.call.removeprefix(_PACKAGE)
        audited, refused = _AUDITED.get(call, Audited.REFUSED), outcome.status in REFUSALS
        if audited is Audited.REFUSED and not refused:
            return
        self._records.labels(call, outcome.status).inc()
        if self._writer is None:
            return
        subject = _subject(outcome.request)
        if audited is Audited.FIRST and not refused and self._is_repeated(outcome, subject):
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
            **({"about": subject} if subject else {}),
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
        who, refused = _identity(outcome), outcome.status in REFUSALS
        kind: Hashable = (bool(outcome.caller) and who, "refused") if refused else (who, call, outcome.status)
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

    def _is_repeated(self, outcome: CallOutcome, subject: dict[str, str]) -> bool:
        """Returns whether the same call, with the same outcome, was recorded less than `AGAIN_S` ago."""
        key: Hashable = (_identity(outcome), outcome.call, outcome.status, *subject.items())
        now = self._clock()
        with self._lock:
            if 0 <= now - self._first.get(key, -AGAIN_S) < AGAIN_S:
                return True
            self._first[key] = now
            self._first.move_to_end(key)
            if len(self._first) > catalogue.AUDIT_REPEATS.default:
                self._first.popitem(last=False)
        return False

    def _write(self) -> None:
        assert self._writer
        while (line := self._lines.get()) != _STOP:
            self._writer.emit(logging.LogRecord("audit", logging.INFO, "", 0, line, None, None))


class _Writer(logging.handlers.RotatingFileHandler):
    """Writes lines to a file that only this user can read, and that no other process writes: each would rotate it."""

    def __init__(self, file: Path, on_lost: Callable[[], None]) -> None:
        self._on_lost, self._failing, self._mode = on_lost, False, private_files.file_mode()
        super().__init__(file, maxBytes=FILE_BYTES, backupCount=FILES, encoding="utf-8", delay=True)

    def _open(self) -> io.TextIOWrapper:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self.baseFilename, flags, self._mode)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        return open(descriptor, "a", encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: ARG002, N802 - by logging
        """Counts a record that was not written, and warns of the first one."""
        self._on_lost()
        if not self._failing:
            _log.warning("the audit log cannot be written; calls continue", file=self.baseFilename, exc_info=True)
        self._failing = True


def audit_file(option: str, member: str, default: Path | None = None) -> Path | None:
    """Returns the file of a role's audit log, or None if it has none.

    Args:
        option: a file; a folder, in which the log is MEMBER.audit.jsonl; `none`; or empty for the default.
        member: the member id of the role, or `coordinator`.
        default: the file if no option is given.
    """
    if not option:
        return default
    if option == NO_LOG:
        return None
    return Path(option, f"{member}.audit.jsonl") if os.path.isdir(option) else Path(option)


def _identity(outcome: CallOutcome) -> Hashable:
    caller = outcome.caller
    return (caller.name, caller.token, outcome.host) if caller else outcome.host


def _who(outcome: CallOutcome) -> dict[str, str]:
    caller = outcome.caller
    if caller is None:
        return {}
    ticket = {"ticket_job": caller.job} if caller.job else {}
    return {"name": caller.name, "role": caller.role.value, "token": caller.token, **ticket}


def _subject(request: Any) -> dict[str, str]:
    """Returns what a request was about: those of its fields that are short and not secret."""
    fields = request.DESCRIPTOR.fields_by_name if hasattr(request, "DESCRIPTOR") else {}
    if "spec" in fields:  # a submission: its field `token` only identifies repeated requests
        return {"job": str(request.spec.name)[:_MAX_TEXT]}
    found = {name: getattr(request, name) for name in _SUBJECT if name in fields}
    if "workers" in fields:
        found["workers"] = ", ".join(it.worker for it in islice(request.workers, _MOST_WORKERS))
    return {name: str(value)[:_MAX_TEXT] for name, value in found.items() if value}


__all__ = ["AGAIN_S", "FILES", "FILE_BYTES", "NO_LOG", "AuditLog", "audit_file"]
