"""Control of Python's garbage collector during the start of a process.

Modules, classes and machine code are hundreds of thousands of objects that never become garbage. Without this module,
the collector would traverse them repeatedly while a process starts. This would take a seventh of the time of the start.
Later it would traverse them at every full collection, and a full collection stops all threads of the process.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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


__all__ = ["frozen_from_gc"]
