"""Identity of this machine, and its random numbers."""

import random
from pathlib import Path

# For pauses and names. The generators of `random` and NumPy belong to the user's program, whose seeds make its results
# repeatable, and processes that are forks of one process would draw the same numbers of them.
ENTROPY = random.SystemRandom()


def host_id() -> str:
    """Returns an id of this machine, the same in all its containers until it reboots, or an empty string if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


__all__ = ["ENTROPY", "host_id"]
