"""The life of a role's process: logs, metrics, the ready line, signals, and a clean end."""

import json
import logging
import os
import queue
import re
import secrets
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import prometheus_client
import structlog

from shoal import _tracing, errors
from shoal._memory import gc_control
from shoal._role import identity as _identity
from shoal._role.http_endpoints import RoleHttpServer
from shoal._role.identity import RoleIdentity


class Running(Protocol):
    """A role that has been started."""

    address: str  # host:port it serves at; empty for a role that serves nothing

    def stop(self) -> None:
        """Ends it: no thread, port, file or child of its is left."""


R = TypeVar("R", bound=Running)

# How long a signal that another thread has taken may go unnoticed.
_SIGNAL_S = 0.5


def configure_logging(log_format: str, level: str, **identity: str) -> None:
    """Structured logs on standard error, for people (`console`) or machines (`json`, an object a line).

    Args:
        log_format: console or json.
        level: debug, info, warning or error.
        identity: fields of every line, whichever thread writes it: the role, and the member's name.
    """

    def identify(
        _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**identity, **event}

    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        identify,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        processors.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty()))
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # a line in one write: roles share a terminal
    )


def default_name(role: str, host: str | None = None) -> str:
    """A member id that says what and where it is, and that no other process there has."""
    plain = re.sub(r"[^a-z0-9]+", "-", (host or socket.gethostname()).lower()).strip("-")[:40]
    return f"{role}-{plain}-{secrets.token_hex(3)}"


def identify(role: str, given: RoleIdentity, *, log_format: str, log_level: str) -> RoleIdentity:
    """Who this process is, by its flags, TF_CONFIG or its pod; see `shoal._role.identity`.

    Args:
        role: coordinator, server or worker.
        given: by flags and their variables.
        log_format: console or json.
        log_level: debug, info, warning or error.

    Raises:
        SystemExit: 2, after saying why on standard error, when that makes no sense.
    """
    configure_logging(log_format, log_level, role=role)
    log = structlog.get_logger(__name__)
    try:
        found = _identity.resolve(role, given, os.environ, default_name(role))
    except errors.BadRequest as error:
        log.error("cannot start", code=error.code, reason=error.message)
        raise SystemExit(2) from None
    if address_warning := _identity.address_warning(role, found, os.environ):
        log.warning("others may not find it", reason=address_warning)
    return found


def run_role(
    role: str,
    start: Callable[[prometheus_client.CollectorRegistry, str], R],
    *,
    metrics_listen: str,
    advertise: str = "",
    leave: Callable[[R, threading.Event], object] | None = None,
    member: str = "",
    log_format: str = "console",
    log_level: str = "info",
    supervised: bool = False,
) -> None:
    """Runs one role until SIGTERM or SIGINT.

    Args:
        role: coordinator, server or worker.
        start: starts the role; given the registry for its metrics and the address at which they are served.
        metrics_listen: host:port of /metrics and /healthz; port 0 takes any free one.
        advertise: host that others reach those pages by, where `metrics_listen` is at all interfaces.
        leave: what a first SIGTERM has the role do before it stops. It returns soon once the event is set that it is
            given, as a second SIGTERM does, SIGINT, or the end of a supervisor; it may set that itself.
        member: its name in the cluster, for its logs.
        log_format: console or json.
        log_level: debug, info, warning or error.
        supervised: started by `shoal up` or a `LocalCluster`: prints one JSON line on standard output when ready,
            and ends when standard input does, so that nothing outlives its parent, however that died.

    Raises:
        SystemExit: 1, after saying why on standard error, when the role cannot start.
    """
    identity = {"role": role, "member": member} if member else {"role": role}
    configure_logging(log_format, log_level, **identity)
    log = structlog.get_logger(__name__)
    ends = _StopSignals()
    if supervised:
        ends.follow_parent()
    try:
        with ends.interrupting(), gc_control.frozen_from_gc():
            _tracing.start(role, member)
            running, pages, stop = _start(start, metrics_listen, advertise)
    except errors.ShoalError as error:
        log.error("cannot start", code=error.code, reason=error.message)
        raise SystemExit(1) from None
    except _SignalReceived:
        log.info("stopped before it was ready")
        return
    try:
        pages.not_ready = ""
        _say_ready(role, running, pages, supervised)
        while not ends.done.wait(_SIGNAL_S):  # a signal may wake another thread, and its handler runs in this one alone
            pass
        pages.not_ready = "it stops"
        log.info("stopping")
        if leave and not ends.enough.is_set():
            leave(running, ends.enough)
    finally:
        stop()
        _tracing.stop()
    log.info("stopped")


class _SignalReceived(BaseException):
    """A signal, while a role starts: to whatever it waits for, as Ctrl-C is to a program."""


class _StopSignals:
    """What tells a role to end: signals, and the end of standard input if that is a supervisor's.

    SIGTERM is how Kubernetes and systemd ask for an orderly end, so the first one alone leaves time for it.

    Attributes:
        done: set once it is to end.
        enough: set once it is to end at once.
    """

    def __init__(self) -> None:
        self.done, self.enough = threading.Event(), threading.Event()
        # A handler interrupts this thread wherever it is, be it in the midst of an event's lock: so another sets them.
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._heard, self._interrupts = False, False
        threading.Thread(target=self._pass_on, name="signals", daemon=True).start()
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal ends this block with `_SignalReceived`: what it waits for may never come, and nothing is there to be lost."""
        self._interrupts = True
        try:
            if self._heard:
                raise _SignalReceived
            yield
        finally:
            self._interrupts = False

    def follow_parent(self) -> None:
        """The end of standard input is as good as SIGINT."""
        threading.Thread(target=self._wait_for_parent, name="parent", daemon=True).start()

    def _handle(self, number: int, _frame: object) -> None:
        self._heard = True
        self._signals.put(number)
        if self._interrupts:
            raise _SignalReceived

    def _pass_on(self) -> None:
        while True:
            number = self._signals.get()
            if number == signal.SIGINT or self.done.is_set():
                self.enough.set()
            self.done.set()

    def _wait_for_parent(self) -> None:
        while os.read(0, 4096):
            pass
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]  # it has begun


def _say_ready(role: str, running: Running, pages: RoleHttpServer, supervised: bool) -> None:
    """Writes where the role is reached to its log, and to standard output for a supervisor."""
    page = getattr(running, "page", "")  # a coordinator's alone
    shown = {"page": page} if page else {}
    structlog.get_logger(__name__).info("ready", address=running.address, metrics=pages.address, **shown)
    if supervised:
        ready = {"role": role, "address": running.address, "metrics": pages.address, "pid": os.getpid()} | shown
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()


def _start(
    start: Callable[[prometheus_client.CollectorRegistry, str], R], metrics_listen: str, advertise: str
) -> tuple[R, RoleHttpServer, Callable[[], None]]:
    """Starts the pages and the role; gives the role, the pages, and what ends both."""
    # When a counter began is told by none of our metrics: Prometheus finds resets by itself.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    pages = RoleHttpServer(metrics_listen, registry, advertise=advertise)
    try:
        running = start(registry, pages.address)
    except BaseException:
        pages.stop()
        raise

    def stop() -> None:
        pages.stop()
        running.stop()

    return running, pages, stop
