"""Metrics of a role's process: memory, processor time, open files, threads and live Python objects."""

import sys
import threading

import prometheus_client


def register(registry: prometheus_client.CollectorRegistry) -> None:
    """Adds the metrics that each role has, whatever it does."""
    prometheus_client.ProcessCollector(registry=registry)
    prometheus_client.PlatformCollector(registry=registry)
    threads = prometheus_client.Gauge("python_threads", "Threads that Python started.", registry=registry)
    threads.set_function(threading.active_count)
    # Objects of a process cannot be counted cheaply. Blocks can, and grow with them.
    blocks = prometheus_client.Gauge(
        "python_allocated_blocks", "Memory blocks that Python's allocator has handed out.", registry=registry
    )
    blocks.set_function(sys.getallocatedblocks)


__all__ = ["register"]
