"""Python's collector of garbage, and what a process loads once and keeps.

Modules, classes and machine code are hundreds of thousands of objects that are never garbage. The collector would walk
through them time and again while they are made, a seventh of the time that a start takes, and at every full collection
from then on, with every thread of the process standing still.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_from_gc() -> Iterator[None]:
    """What is made in this block, and whatever there was before, the collector never looks at.

    For what stays as long as the process does: a cycle among it that is garbage stays, too.
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
