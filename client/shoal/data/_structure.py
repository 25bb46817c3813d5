"""Arrays within tuples, lists and dicts: apart, and together again."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shoal import errors

Rebuild = Callable[[Sequence[np.ndarray]], Any]


def flatten(value: Any, who: str) -> tuple[dict[str, np.ndarray], Rebuild]:
    """The arrays, by what messages call them, and the function that puts others in their places.

    Args:
        value: an array, or tuples, lists and dicts of arrays, however deep.
        who: gives it, for messages.

    Raises:
        InvalidData: there is something else in it, no array at all, or arrays of different lengths.
    """
    arrays: dict[str, np.ndarray] = {}
    template = _collect(value, "", arrays, who)
    if not arrays:
        raise errors.InvalidData(f"{who} is empty; give an array, or a dict or tuple of arrays")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        told = ", ".join(f"{name or 'the array'}: {length}" for name, length in lengths.items())
        raise errors.InvalidData(f"{who} has arrays of different lengths ({told}); each needs a row for every sample")
    return arrays, lambda others: _replace(template, iter(others))


def _collect(value: Any, path: str, arrays: dict[str, np.ndarray], who: str) -> Any:
    """The same structure, with None for each array."""
    match value:
        case dict():
            return {key: _collect(item, f"{path}[{key!r}]", arrays, who) for key, item in value.items()}
        case tuple() | list():
            items = [_collect(item, f"{path}[{place}]", arrays, who) for place, item in enumerate(value)]
            named = type(value) is not tuple and isinstance(value, tuple)
            return type(value)(*items) if named else type(value)(items)
    array = np.asarray(value) if isinstance(value, np.ndarray) else value
    if not isinstance(array, np.ndarray) or not array.ndim:
        kind = "an array without dimensions" if isinstance(array, np.ndarray) else f"a {type(value).__name__}"
        raise errors.InvalidData(f"{who}{path} is {kind}; give an array whose first dimension is the samples")
    arrays[path] = array
    return None


def _replace(template: Any, arrays: Iterator[np.ndarray]) -> Any:
    match template:
        case None:
            return next(arrays)
        case dict():
            return {key: _replace(item, arrays) for key, item in template.items()}
    items = [_replace(item, arrays) for item in template]
    named = type(template) is not tuple and isinstance(template, tuple)
    return type(template)(*items) if named else type(template)(items)


__all__ = ["Rebuild", "flatten"]
