"""Memory that is lent as NumPy arrays, and comes back when nothing looks into it any more.

Where the memory comes from is in `shoal._transport.segment` and `shoal._memory.buffers`.
"""

import weakref
from collections.abc import Callable

import numpy as np


def lend(memory: memoryview, give_back: Callable[..., object], *args: object) -> np.ndarray:
    """Memory as an array, which all views of it keep alive: views of views, of other dtypes and shapes.

    NumPy makes the base of a view's base the view's own, but stops where that is no array; here it is a memoryview.

    Args:
        memory: contiguous and not empty; only this array is to look into it.
        give_back: called with `args` once the array and all its views have been collected: by whatever thread lets go
            of the last, and by the garbage collector at any point of the code. It must take no lock that it would
            have to wait for, and is not called any more when the interpreter ends.

    Returns:
        A flat array of unsigned bytes.
    """
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, give_back, *args).atexit = False
    return array


__all__ = ["lend"]
