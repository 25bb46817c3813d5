"""Identity of this machine."""

from pathlib import Path


def host_id() -> str:
    """Returns an id of this machine, the same in all its containers until it reboots, or an empty string if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


__all__ = ["host_id"]
