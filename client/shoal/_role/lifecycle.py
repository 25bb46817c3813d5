"""Lifecycle of a role's process: metrics, the ready line, signals, and a clean stop."""

import enum
import json
import os
import queue
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol, TypeVar

import prometheus_client
import structlog

from shoal import _tracing, errors
from shoal._memory import gc_control
from shoal._role import identity as _identity
from shoal._role import process_metrics
from shoal._role.expiry_reminder import ExpiryReminder
from shoal._role.exposure import check_exposure, insecure_consequence
from shoal._role.http_endpoints import RoleHttpServer
from shoal._role.identity import RoleIdentity
from shoal._role.logs import configure_logging
from shoal._security import AccessRole, Authorizer, Credentials
from shoal._system import raise_open_files
from shoal._system.exit_codes import exit_code

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles


class Running(Protocol):
    """A role that has been started."""

    address: str  # host:port that it serves at; empty for a role that serves nothing
    authorizer: Authorizer  # decides who may read its metrics

    def stop(self) -> None:
        """Stops the role and releases its threads, ports, files and child processes."""


class DrainState(enum.Enum):
    """What the coordinator asks of a role because a user has ordered it.

    Attributes:
        SERVING: nothing.
        DRAINING: to serve on, and to report that it is not ready.
        DRAINED: to leave the cluster now.
    """

    SERVING = ""
    DRAINING = "draining"
    DRAINED = "drained"


R = TypeVar("R", bound=Running)

# Seconds until the main thread notices a signal that another thread received, or a role's order to drain.
_SIGNAL_S = 0.5


def default_name(role: str, host: str | None = None) -> str:
    """Returns a unique member id that contains the role and the host."""
    plain = re.sub(r"[^a-z0-9]+", "-", (host or socket.gethostname()).lower()).strip("-")[:40]
    return f"{role}-{plain}-{secrets.token_hex(3)}"


def identify(role: str, given: RoleIdentity, *, log_format: str, log_level: str, zone: str = "") -> RoleIdentity:
    """Determines the identity of this process from its options, TF_CONFIG or its pod (`shoal._role.identity`).

    Args:
        role: coordinator, server or worker.
        given: the identity from options and their variables.
        log_format: console or json.
        log_level: debug, info, warning or error.
        zone: the zone of a server, which is checked.

    Returns:
        The identity.

    Raises:
        SystemExit: with status 2 if the identity or the zone is invalid. The log has the reason.
    """
    configure_logging(log_format, log_level, role=role)
    log = structlog.get_logger(__name__)
    try:
        found = _identity.resolve(role, given, os.environ, default_name(role))
        _identity.check_zone(found.name, zone)
    except errors.BadRequest as error:
        log.error("cannot start", code=error.code, reason=error.message)
        raise SystemExit(2) from None
    if address_warning := _identity.address_warning(role, found, os.environ):
        log.warning("other processes may not find this one", reason=address_warning)
    return found


class ConnectionOptions(Protocol):
    """The options of a role that say who may connect to it."""

    @property
    def tls_ca(self) -> str: ...
    @property
    def tls_cert(self) -> str: ...
    @property
    def tls_key(self) -> str: ...
    @property
    def tls_client_certs(self) -> str: ...
    @property
    def insecure(self) -> bool: ...


def find_credentials(role: str, options: ConnectionOptions, listens: Iterable[str]) -> Credentials:
    """Reads the files for TLS that the options of a role name, or their variables. `identify` precedes it.

    Warns if the role was started with --insecure.

    Args:
        role: coordinator, server or worker.
        options: its options.
        listens: the addresses at which it listens, host:port each; empty ones are none.

    Returns:
        The credentials.

    Raises:
        SystemExit: with status 2 if the files are not valid, or the role would be open to the network without TLS. The
            log has the reason.
    """
    log = structlog.get_logger(__name__)
    try:
        required = options.tls_client_certs == "required"
        paths = options.tls_ca, options.tls_cert, options.tls_key
        found = Credentials.find(*paths, client_certificates=required, role=AccessRole(role))
        if found.tls:
            found.tls.check_serves()
        check_exposure(role, listens, tls=bool(found.tls), insecure=options.insecure)
    except errors.BadRequest as error:
        log.error("cannot start", role=role, code=error.code, reason=error.message)
        raise SystemExit(2) from None
    if options.insecure:
        log.warning("started with --insecure", consequence=insecure_consequence(role))
    return replace(found, closed=not options.insecure, insecure=options.insecure)


def run_role(
    role: str,
    start: Callable[[prometheus_client.CollectorRegistry, str], R],
    *,
    metrics_listen: str,
    advertise: str = "",
    leave: Callable[[R, threading.Event], object] | None = None,
    drain_state: Callable[[R], DrainState] = lambda _: DrainState.SERVING,
    member: str = "",
    log_format: str = "console",
    log_level: str = "info",
    supervised: bool = False,
    tls: "TlsFiles | None" = None,
    insecure: bool = False,
) -> None:
    """Runs one role until SIGTERM or SIGINT, or until it has drained.

    Args:
        role: coordinator, server or worker.
        start: starts the role. It gets the registry for its metrics, and the address at which they are served.
        metrics_listen: host:port for /metrics and /healthz. Port 0 takes any free port.
        advertise: host by which others reach these endpoints if `metrics_listen` is at all interfaces.
        leave: called at the first SIGTERM, before the role stops. It gets an event, and returns soon after the event is
            set. A second SIGTERM, SIGINT and the end of the supervisor set the event; so may `leave` itself. It is also
            called when the role has drained.
        drain_state: returns what the coordinator asks of the role.
        member: the member's name in the cluster, for its logs.
        log_format, log_level: as for `configure_logging`.
        supervised: whether `shoal up` or a `LocalCluster` started the process. It then prints one JSON line on standard
            output when it is ready, and stops at the end of standard input, so that it never outlives its parent.
        tls: TLS settings of /metrics and /healthz. None means no TLS. The log warns before a certificate expires.
        insecure: whether --insecure was given, for a metric.

    Raises:
        SystemExit: the role cannot start: the status is the exit code of the error. The log has the reason.
    """
    configure_logging(log_format, log_level, role=role, **({"member": member} if member else {}))
    log, signals, reminder = structlog.get_logger(__name__), StopSignals(), ExpiryReminder(tls)
    if supervised:
        signals.follow_parent()
    try:
        with signals.interrupting(), gc_control.frozen_from_gc():
            _tracing.start(role, member)
            running, endpoints, stop = _start(start, _registry(role, tls, insecure), metrics_listen, advertise, tls)
    except errors.ShoalError as error:
        log.error("cannot start", code=error.code, reason=error.message)
        raise SystemExit(exit_code(error)) from None
    except _SignalReceived:
        log.info("stopped before it was ready")
        return
    try:
        endpoints.authorizer, endpoints.not_ready = running.authorizer, ""
        _announce_ready(role, running, endpoints, supervised)
        _await_end(signals, reminder, lambda: drain_state(running), endpoints)
        if leave and not signals.stop_now.is_set():
            leave(running, signals.stop_now)
    finally:
        stop()
        _tracing.stop()
    log.info("stopped")


def _await_end(
    signals: "StopSignals", reminder: ExpiryReminder, drain_state: Callable[[], DrainState], endpoints: RoleHttpServer
) -> None:
    """Waits for a signal, or until the role has drained. The role is then not ready any more.

    Args:
        signals: the signals that stop the role.
        reminder: warns before a certificate expires.
        drain_state: returns what the coordinator asks of the role.
        endpoints: what says whether the role is ready.
    """
    asked = DrainState.SERVING
    while asked is not DrainState.DRAINED and not signals.stop.wait(_SIGNAL_S):
        reminder.check(time.time())  # besides, a signal may wake another thread, but handlers run in this one
        asked = drain_state()
        endpoints.not_ready = asked.value
    endpoints.not_ready = "stopping"
    structlog.get_logger(__name__).info("stopping")


def _check_transport() -> None:
    """Raises BadRequest if SHOAL_TRANSPORT is unknown, so that it is refused now and not at the first call."""
    from shoal._transport import chosen_setting  # noqa: PLC0415 - numpy is slow

    chosen_setting()


class _SignalReceived(BaseException):
    """Raised by a signal while a role starts, as KeyboardInterrupt is by Ctrl-C."""


class StopSignals:
    """Requests to stop a role: signals, and the end of a supervisor's standard input.

    Kubernetes and systemd send SIGTERM for a graceful stop, so only the first SIGTERM leaves time for one.

    Attributes:
        stop: set when the role must stop.
        stop_now: set when the role must stop without a graceful end.
    """

    def __init__(self) -> None:
        self.stop, self.stop_now = threading.Event(), threading.Event()
        # A handler may interrupt this thread while it holds an event's lock, so another thread sets the events.
        self._signals: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._received, self._interrupts = False, False
        threading.Thread(target=self._pass_on, name="signals", daemon=True).start()
        signal.signal(signal.SIGINT, self._handle)
        signal.signal(signal.SIGTERM, self._handle)

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Makes a signal raise `_SignalReceived` in the block, which may wait for something that never happens."""
        self._interrupts = True
        try:
            if self._received:
                raise _SignalReceived
            yield
        finally:
            self._interrupts = False

    def follow_parent(self) -> None:
        """Handles the end of standard input as SIGINT."""
        threading.Thread(target=self._wait_for_parent, name="parent", daemon=True).start()

    def _handle(self, number: int, _frame: object) -> None:
        self._received = True
        self._signals.put(number)
        if self._interrupts:
            raise _SignalReceived

    def _pass_on(self) -> None:
        while True:
            number = self._signals.get()
            if number == signal.SIGINT or self.stop.is_set():
                self.stop_now.set()
            self.stop.set()

    def _wait_for_parent(self) -> None:
        while os.read(0, 4096):
            pass
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)  # type: ignore[arg-type]  # it has started


def _announce_ready(role: str, running: Running, endpoints: RoleHttpServer, supervised: bool) -> None:
    """Writes the addresses of the role to its log, and to standard output for a supervisor."""
    page = getattr(running, "page", "")  # only a coordinator has one
    shown = {"page": page} if page else {}
    structlog.get_logger(__name__).info("ready", address=running.address, metrics=endpoints.address, **shown)
    if supervised:
        ready = {"role": role, "address": running.address, "metrics": endpoints.address, "pid": os.getpid()} | shown
        sys.stdout.write(json.dumps(ready) + "\n")
        sys.stdout.flush()


def _registry(role: str, tls: "TlsFiles | None", insecure: bool) -> prometheus_client.CollectorRegistry:
    """Returns a registry with the metrics of the process."""
    # Counters have no creation times: Prometheus detects resets itself.
    prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = prometheus_client.CollectorRegistry()
    process_metrics.register(registry)
    process_metrics.register_insecure(registry, role, insecure=insecure)
    process_metrics.register_expiry(registry, role, tls)
    return registry


def _start(
    start: Callable[[prometheus_client.CollectorRegistry, str], R],
    registry: prometheus_client.CollectorRegistry,
    metrics_listen: str,
    advertise: str,
    tls: "TlsFiles | None",
) -> tuple[R, RoleHttpServer, Callable[[], None]]:
    """Starts the HTTP endpoints and the role. Returns the role, the endpoints, and a function that stops both."""
    _check_transport()
    files = raise_open_files()  # each connection is one
    structlog.get_logger(__name__).debug("raised the limit on open files", files=files)
    endpoints = RoleHttpServer(metrics_listen, registry, advertise=advertise, tls=tls)
    try:
        running = start(registry, endpoints.address)
    except BaseException:
        endpoints.stop()
        raise

    def stop() -> None:
        endpoints.stop()
        running.stop()

    return running, endpoints, stop
