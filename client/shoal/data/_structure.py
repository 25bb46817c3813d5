"""The conversion of nested tuples, lists and dicts of arrays to a flat list of arrays, and back."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shoal import errors

Rebuild = Callable[[Sequence[np.ndarray]], Any]


def flatten(value: Any, owner: str) -> tuple[dict[str, np.ndarray], Rebuild]:
    """Returns the arrays by their path, and a function that puts other arrays in their places.

    Args:
        value: an array, or tuples, lists and dicts of arrays, at any depth.
        owner: name of the value, for messages.

    Raises:
        InvalidData: the value contains something else, no array, or arrays of different lengths.
    """
    arrays: dict[str, np.ndarray] = {}
    template = _collect(value, "", arrays, owner)
    if not arrays:
        raise errors.InvalidData(f"{owner} is empty; give an array, or a dict or tuple of arrays")
    lengths = {name: len(array) for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        each = ", ".join(f"{name or 'the array'}: {length}" for name, length in lengths.items())
        raise errors.InvalidData(f"{owner} has arrays of different lengths ({each}); each needs a row for every sample")
    return arrays, lambda others: _replace(template, iter(others))


def _collect(value: Any, path: str, arrays: dict[str, np.ndarray], owner: str) -> Any:
    """Returns the same structure with None for each array, and adds the arrays to `arrays`."""
    match value:
        case dict():
            return {key: _collect(item, f"{path}[{key!r}]", arrays, owner) for key, item in value.items()}
        case tuple() | list():
            items = [_collect(item, f"{path}[{place}]", arrays, owner) for place, item in enumerate(value)]
            named = type(value) is not tuple and isinstance(value, tuple)
            return type(value)(*items) if named else type(value)(items)
    array = np.asarray(value) if isinstance(value, np.ndarray) else value
    if not isinstance(array, np.ndarray) or not array.ndim:
        kind = "an array without dimensions" if isinstance(array, np.ndarray) else f"a {type(value).__name__}"
        raise errors.InvalidData(f"{owner}{path} is {kind}; give an array whose first dimension is the samples")
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
