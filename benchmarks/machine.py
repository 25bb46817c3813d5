"""Description of this machine: its hardware, its software versions and its measured limits."""

import datetime
import importlib.metadata
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import processes
import psutil
import rivals
from harness import HERE

_PACKAGES = ("shoal", "grpcio", "protobuf", "numpy", "numba")


def described(interpreters: Mapping[str, str]) -> dict[str, Any]:
    """Returns the machine's hardware, and the versions of the measured software."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release().partition("-")[0],
        "python": platform.python_version(),
        "versions": {name: importlib.metadata.version(name) for name in _PACKAGES},
        "peers": rivals.versions(interpreters),
    }


def limits(interpreters: Mapping[str, str]) -> dict[str, float]:
    """Memory and loopback in GB/s, and torch's fused Adam where its interpreter is given: see peers/limits.py.

    Raises:
        Failed: the script did not print them.
    """
    python = interpreters.get("torch", sys.executable)
    return processes.run([python, str(HERE / "peers" / "limits.py")], timeout_s=120)


def now() -> str:
    """Returns the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
