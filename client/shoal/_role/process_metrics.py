"""Metrics of a role's process: memory, processor time, open files, threads, Python objects, and its security."""

import math
import sys
import threading
from typing import TYPE_CHECKING

import prometheus_client

if TYPE_CHECKING:
    from shoal._security.tls import TlsFiles


def register(registry: prometheus_client.CollectorRegistry) -> None:
    """Adds the metrics that each role has, whatever it does."""
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    threads = prometheus_client.Gauge("python_threads", "Threads that Python started.", registry=registry)
    threads.set_function(threading.active_count)
    # Objects of a process cannot be counted cheaply. Blocks can, and grow with them.
    blocks = prometheus_client.Gauge(
        "python_allocated_blocks",
        "Memory blocks that Python's allocator has handed out, except those in its cache of attributes.",
        registry=registry,
    )
    blocks.set_function(_allocated_blocks)


def register_insecure(registry: prometheus_client.CollectorRegistry, role: str, *, insecure: bool) -> None:
    """Adds the metric by which an operator finds the processes that anyone can reach."""
    prometheus_client.Gauge(
        f"shoal_{role}_insecure", "1 if the process was started with --insecure, otherwise 0.", registry=registry
    ).set(insecure)


def register_expiry(registry: prometheus_client.CollectorRegistry, role: str, tls: "TlsFiles | None") -> None:
    """Adds the metric by which an operator finds certificates that nobody has replaced."""

    def ends_at() -> float:
        validity = tls.current().validity if tls else None
        return validity.ends_at if validity else math.inf

    prometheus_client.Gauge(
        f"shoal_{role}_certificate_expiry_timestamp_seconds",
        "Unix time when the certificate of the process expires, or its CA if that expires earlier; +Inf without TLS.",
        registry=registry,
    ).set_function(ends_at)


def _allocated_blocks() -> int:
    """Returns the number of allocated blocks after it has cleared the interpreter's cache of attributes.

    The cache has 4,096 entries, and each keeps a name alive. C code looks attributes up by names that it makes for one
    look-up (a `match` of a class does, and so do messages), so the cache fills over hours. That looks like a leak.
    Clearing it takes 5 us.
    """
    sys._clear_type_cache()
    return sys.getallocatedblocks()


__all__ = ["register", "register_expiry", "register_insecure"]
