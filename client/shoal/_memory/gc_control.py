"""Control of Python's garbage collector where many objects are made that stay.

During the start of a process, modules, classes and machine code are hundreds of thousands of objects that never become
garbage. Without this module, the collector would traverse them repeatedly while a process starts. This would take a
seventh of the time of the start. Later it would traverse them at every full collection, and a full collection stops all
threads of the process.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_lock = threading.Lock()  # guards the next two
_delays = 0  # blocks of `delayed_gc` that run
_was_enabled = False  # before the first of them


@contextmanager
def frozen_from_gc() -> Iterator[None]:
    """Excludes all objects that exist at the end of the block from garbage collection.

    Use it for objects that live as long as the process. Garbage cycles among them are never freed.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()


@contextmanager
def delayed_gc() -> Iterator[None]:
    """Delays garbage collection until the end of the block, and of the blocks of other threads that overlap with it.

    Use it for a short block that makes many objects which stay. Otherwise, the collector would traverse them repeatedly
    while they are made: a session of 10,000 variables would need a third more CPU time to enter its job.
    """
    global _delays, _was_enabled  # noqa: PLW0603 - the collector itself is a global of the process
    with _lock:
        if not _delays:
            _was_enabled = gc.isenabled()
            gc.disable()
        _delays += 1
    try:
        yield
    finally:
        with _lock:
            _delays -= 1
            if not _delays and _was_enabled:
                gc.enable()


__all__ = ["delayed_gc", "frozen_from_gc"]
