"""Futex of Linux: a wait for a change of a number in shared memory, which costs no processor time (futex(2))."""

import ctypes
import platform
import time
from typing import Any

import numpy as np

# Number of the system call, by machine. These store the lower half of a number first. On other machines, a wait sleeps.
_CALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine(), 0)
# Whether the processor keeps the order of writes, and of reads, as other processors see them.
_KEEPS_ORDER = platform.machine() == "x86_64"
_WAIT, _WAKE = 0, 1
_ALL = 0x7FFFFFFF
_PAUSE_S = 50e-6
_libc = ctypes.CDLL(None)
_syscall, _sched_yield = _libc.syscall, _libc.sched_yield


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Futex:
    """A number in memory that processes share. One process changes it, and any number of them wait for that.

    A process that sees a new number also sees what was written to shared memory before the number was changed.

    Args:
        number: array of one uint64. Its memory must stay valid while this object exists.
    """

    def __init__(self, number: np.ndarray[Any, Any]) -> None:
        self._number = number
        self._address = ctypes.c_void_p(number.ctypes.data)  # the kernel sees its lower half

    @property
    def value(self) -> int:
        """The number."""
        value = int(self._number[0])
        self._keep_order()
        return value

    def set(self, value: int) -> None:
        """Changes the number, and wakes all processes that wait."""
        self._keep_order()
        self._number[0] = value
        if _CALL:
            _syscall(_CALL, self._address, _WAKE, _ALL, None)

    def wait(self, value: int, within_s: float) -> None:
        """Waits until the number is no longer `value`, or for `within_s` seconds. It may also return earlier."""
        if not _CALL:
            time.sleep(min(_PAUSE_S, within_s))
            return
        limit = _TimeSpec(int(within_s), int(within_s % 1 * 1e9))
        _syscall(_CALL, self._address, _WAIT, ctypes.c_uint32(value & 0xFFFFFFFF), ctypes.byref(limit))

    def _keep_order(self) -> None:
        if not _KEEPS_ORDER:
            _sched_yield()  # `ctypes` releases and takes Python's lock around each call, which orders memory


__all__ = ["Futex"]
