"""Which machine this is."""

from pathlib import Path


def host_id() -> str:
    """Names this machine until it boots again, in all its containers; empty if the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


__all__ = ["host_id"]
