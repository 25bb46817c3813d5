"""Memory of this process, and its limit."""

import os
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
# The files of version 2 and of version 1. A container sees its own group at the root.
_FILES = ("memory.max", "memory/memory.limit_in_bytes")


def memory_limit(groups: Path = _CGROUPS, physical: int | None = None) -> int:
    """Returns the container's memory limit or the machine's memory, whichever is less, in bytes.

    Args:
        groups: folder where control groups are mounted.
        physical: the machine's memory in bytes; None means that the operating system is asked.
    """
    limits = [physical or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for name in _FILES:
        try:
            limits.append(int((groups / name).read_text()))
        except (OSError, ValueError):  # the other version, or no limit ("max")
            continue
    return min(limits)


def resident_bytes() -> int:
    """Returns the bytes of memory that this process has now, without shared memory and mapped files."""
    resident, shared = map(int, Path("/proc/self/statm").read_text().split()[1:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


__all__ = ["memory_limit", "resident_bytes"]
