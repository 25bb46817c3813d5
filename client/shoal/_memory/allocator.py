"""How this process's C allocator treats large blocks: set up once, as the first thing that a process of Shoal's does.

It loads neither gRPC nor NumPy, which have allocated, and may have started threads, by the time that they are there.
"""

import ctypes
import os

from shoal import errors

_SWITCH = "SHOAL_ALLOCATOR"
_MIB = 1 << 20
# Options of mallopt, from glibc's malloc.h.
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8
# By default a block over 128 KiB is a mapping of its own or is given back as soon as it is free, and each thread fills
# a heap of its own. Every chunk then comes on fresh pages, and to fault these in and clear them takes longer than to
# copy what goes there. Here freed memory stays, and what one thread has freed the others use.
_TUNED = (
    (_MMAP_THRESHOLD, 32 * _MIB),  # the most that glibc takes
    (_TRIM_THRESHOLD, 1024 * _MIB),
    (_TOP_PAD, 64 * _MIB),
    (_ARENA_MAX, 1),
)


def tune() -> bool:
    """Makes glibc keep freed memory for reuse: up to 1 GiB stays with the process, and large arrays move faster.

    Processes of Shoal's do so by themselves. With a session, call it in your own program, before it imports NumPy or
    a framework and starts threads: later it does less. It holds for the whole process, and there is no way back.

    Returns:
        Whether it was done: not where $SHOAL_ALLOCATOR is "default" ("tuned", or unset, is the other choice), and not
        with another C library than glibc.

    Raises:
        BadRequest: $SHOAL_ALLOCATOR is neither.
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
