"""Protection of a daemon's environment against trainers that run as the daemon's own user."""

import ctypes
import sys

_PR_SET_DUMPABLE = 4


def hide_environment() -> bool:
    """Makes /proc/PID of this process readable by root only, with its environment, its memory and its open files.

    Processes that this one starts are not affected. The process writes no core dumps, and only root can trace it.

    Returns:
        Whether the environment is hidden; False if the system is not Linux.
    """
    return sys.platform == "linux" and bool(ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0) == 0)


__all__ = ["hide_environment"]
