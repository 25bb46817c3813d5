"""Settings of this process's C allocator for large blocks, applied before anything else.

This module imports neither gRPC nor NumPy, because both allocate memory and may start threads when they are imported.
"""

import ctypes
import os

from shoal import errors

_SWITCH = "SHOAL_ALLOCATOR"
_MIB = 1 << 20
# Options of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
# By default, a block over 128 KiB is a separate mapping or is returned to the kernel when it is freed, and each thread
# has its own heap. Every chunk then uses fresh memory pages, and faulting and clearing these takes longer than copying
# the chunk. With these settings, freed memory stays with the process, and all threads share it.
_TUNED = (
    (_MMAP_THRESHOLD, 32 * _MIB),  # glibc's maximum
    (_TRIM_THRESHOLD, 1024 * _MIB),
    (_TOP_PAD, 64 * _MIB),
    (_ARENA_MAX, 1),
)


def tune() -> bool:
    """Makes glibc keep up to 1 GiB of freed memory for reuse, so that large arrays move faster.

    Shoal's own processes call this function. With a session, call it in your program before it imports NumPy or a
    framework and before it starts threads; a later call has less effect. It applies to the whole process and cannot be
    undone.

    Returns:
        Whether the settings were applied. They are not if $SHOAL_ALLOCATOR is "default", or if the C library is not
        glibc. The variable's other value, "tuned", is the default.

    Raises:
        BadRequest: $SHOAL_ALLOCATOR is neither "tuned" nor "default".
    """
    wanted = os.environ.get(_SWITCH) or "tuned"
    if wanted not in {"tuned", "default"}:
        raise errors.BadRequest(f'{_SWITCH} is {wanted!r}; it must be "tuned" or "default"', value=wanted)
    if wanted == "default":
        return False
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        return False
    done = [libc.mallopt(option, value) == 1 for option, value in _TUNED]
    return all(done)


__all__ = ["tune"]
