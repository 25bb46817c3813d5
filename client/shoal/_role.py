"""The life of a role's process: logs, metrics, the ready line, signals, and a clean end."""

import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Protocol

import prometheus_client
import structlog

from shoal import errors


class Running(Protocol):
    """A role that has been started."""

    address: str  # host:port it serves at; empty for a role that serves nothing

    def stop(self) -> None:
        """Ends it: no thread, port, file or child of its is left."""


def configure_logging(log_format: str, level: str) -> None:
    """Structured logs on standard error, for people (`console`) or machines (`json`, an object a line)."""
    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    )
    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if log_format == "json":
        processors.append(structlog.processors.format_exc_info)
    structlog.configure(
        processors=[*processors, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )


def run_role(
    name: str,
    start: Callable[[prometheus_client.CollectorRegistry, str], Running],
    *,
    metrics_listen: str,
    log_format: str = "console",
    log_level: str = "info",
    supervised: bool = False,
) -> None:
    """Runs one role until SIGTERM or SIGINT.

    Args:
        name: coordinator, server or worker.
        start: starts the role; given the registry for its metrics and the address at which they are served.
        metrics_listen: host:port of /metrics; port 0 takes any free one.
        log_format: console or json.
        log_level: debug, info, warning or error.
        supervised: started by `shoal up` or a `LocalCluster`: prints one JSON line on standard output when ready,
            and ends when standard input does, so that nothing outlives its parent, however that died.

    Raises:
        SystemExit: 1, after saying why on standard error, when the role cannot start.
    """
    configure_logging(log_format, log_level)
    structlog.contextvars.bind_contextvars(role=name)
    log = structlog.get_logger(__name__)
    done = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: done.set())
    if supervised:
        threading.Thread(target=_wait_for_parent, args=(done,), name="parent", daemon=True).start()
    registry = prometheus_client.CollectorRegistry()
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    try:
        metrics_address, stop_metrics = _serve_metrics(metrics_listen, registry)
        try:
            role = start(registry, metrics_address)
        except BaseException:
            stop_metrics()
            raise
    except errors.ShoalError as error:
        log.error("cannot start", code=error.code, reason=error.message)
        raise SystemExit(1) from None
    try:
        log.info("ready", address=role.address, metrics=metrics_address)
        if supervised:
            ready = {"role": name, "address": role.address, "metrics": metrics_address, "pid": os.getpid()}
            sys.stdout.write(json.dumps(ready) + "\n")
            sys.stdout.flush()
        done.wait()
        log.info("stopping")
    finally:
        metrics_end = threading.Thread(target=stop_metrics, name="metrics end")  # takes up to half a second
        metrics_end.start()
        role.stop()
        metrics_end.join()
    log.info("stopped")


def _serve_metrics(listen: str, registry: prometheus_client.CollectorRegistry) -> tuple[str, Callable[[], None]]:
    host, _, port = listen.rpartition(":")
    try:
        server, thread = prometheus_client.start_http_server(int(port), host or "0.0.0.0", registry)  # noqa: S104
    except (OSError, ValueError) as error:
        raise errors.PortInUse(
            f"cannot serve metrics on {listen}: {error}; choose another port, or 0 for any free one",
            address=listen,
        ) from None

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return f"{host}:{server.server_port}", stop


def _wait_for_parent(done: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    done.set()
