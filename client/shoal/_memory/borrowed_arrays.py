"""Memory that is lent as NumPy arrays and returned when no array refers to it any more.

The memory comes from `shoal._transport.segment` and `shoal._memory.buffers`.
"""

import weakref
from collections.abc import Callable

import numpy as np


def lend(memory: memoryview, give_back: Callable[..., object], *args: object) -> np.ndarray:
    """Lends memory as an array. All views of the array keep it alive, whatever their dtypes and shapes.

    The base of an array is the object that owns its memory. For a view of a view, NumPy sets the base to the first
    array of the chain. Here this is the array that this function creates, because its own base is a memoryview.

    Args:
        memory: contiguous and not empty. No other array may refer to it.
        give_back: called with `args` after the array and all its views have been collected. Any thread may call it, and
            so may the garbage collector at any point of the code, so it must not wait for a lock. It is not called
            when the interpreter exits.
        args: arguments for `give_back`.

    Returns:
        A flat array of unsigned bytes.
    """
    array = np.frombuffer(memory, np.uint8)
    weakref.finalize(array, give_back, *args).atexit = False
    return array


__all__ = ["lend"]
