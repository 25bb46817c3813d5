"""Bytes of the arrays that recorded steps keep for the backward pass."""

import functools
from collections.abc import Iterable
from typing import Any

from shoal.program import Array
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.tensor_parallel import SplitArray
from shoal_distribute.values import DistributedVariable
from shoal_nn.layer import PartwisePullback


def saved_bytes(holders: Iterable[Any], apart_from: Iterable[Array]) -> int:
    """Returns the bytes of all arrays that objects hold. Views of one array count once, as the largest of them.

    Args:
        holders: see `saved_arrays`.
        apart_from: see `saved_arrays`.
    """
    return sum(saved_arrays(holders, apart_from).values())


def saved_arrays(holders: Iterable[Any], apart_from: Iterable[Array]) -> dict[int, int]:
    """Returns the bytes of each array that objects hold, by `memory_id`. A view stands for the array that it shows.

    Args:
        holders: arrays, and pullbacks, which hold arrays in their closures.
        apart_from: arrays that do not count, such as the values of variables.
    """
    ignored = {memory_id(part) for it in apart_from for part in (it.parts if isinstance(it, SplitArray) else [it])}
    sizes: dict[int, int] = {}
    seen: set[int] = set()
    todo: list[Any] = list(holders)
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, DistributedVariable):
            continue
        seen.add(id(found))
        if hasattr(found, "nbytes") and hasattr(found, "shape"):
            memory = memory_id(found)
            if memory not in ignored:
                sizes[memory] = max(sizes.get(memory, 0), int(found.nbytes))
        else:
            todo += _held_by(found)
    return sizes


def _held_by(found: Any) -> list[Any]:
    """Returns what an object holds, as far as the pullbacks of layers are built of such objects."""
    match found:
        case Tensor():
            return [found.stored]
        case SplitArray():
            return list(found.parts)
        case tuple() | list() | set():
            return list(found)
        case dict():
            return list(found.values())
        case functools.partial():
            return [found.func, *found.args, *found.keywords.values()]
        case PartwisePullback():
            return list(vars(found).values())
    held = list(getattr(found, "__defaults__", None) or ())
    for cell in getattr(found, "__closure__", None) or ():
        try:
            held.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    own = getattr(found, "__self__", None)  # of a method
    return held if own is None or isinstance(own, type) else [*held, own, getattr(found, "__func__", None)]


def memory_id(array: Array) -> int:
    """Returns the id of the array whose memory this array shows. It is valid as long as the array exists."""
    while getattr(array, "base", None) is not None and hasattr(array.base, "nbytes"):
        array = array.base
    return id(array)


__all__ = ["memory_id", "saved_arrays", "saved_bytes"]
