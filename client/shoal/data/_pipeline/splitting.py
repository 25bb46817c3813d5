"""The division of a batch into parts, for replicas and processes. No I/O, no state."""

from collections.abc import Callable
from typing import Any

import numpy as np

from shoal import errors


def even_sizes(samples: int, parts: int) -> list[int]:
    """Returns the sizes of the parts of a batch. Any two differ by at most 1, and the larger ones come first.

    Args:
        samples: number of samples in the batch, 0 or more.
        parts: number of parts, 1 or more.
    """
    least, more = divmod(samples, parts)
    return [least + 1] * more + [least] * (parts - more)


def part_bounds(samples: int, parts: int, first: int, count: int) -> tuple[int, int]:
    """Returns the place of some consecutive parts in a batch: the first sample, and the one after the last.

    Args:
        samples: number of samples in the batch.
        parts: number of parts of the whole batch.
        first: the first of these parts.
        count: number of these parts.
    """
    sizes = even_sizes(samples, parts)
    start = sum(sizes[:first])
    return start, start + sum(sizes[first : first + count])


def split_batch(batch: Any, parts: int) -> list[Any]:
    """Returns the parts of a batch, with the sizes of `even_sizes`. Their arrays are views.

    If the batch has fewer samples than there are parts, the last parts are empty: their arrays have no rows.

    Args:
        batch: an array, or tuples, lists and dicts of arrays, whose first dimension is the samples.
        parts: number of parts, 1 or more.

    Raises:
        InvalidData: the batch has no arrays, or they have different lengths.
    """
    sizes = even_sizes(length_of(batch), parts)
    stops = np.cumsum(sizes).tolist()
    return [sliced(batch, stop - size, stop) for size, stop in zip(sizes, stops, strict=True)]


def length_of(batch: Any) -> int:
    """Returns the number of samples of a batch.

    Raises:
        InvalidData: the batch has no arrays, or they have different lengths.
    """
    lengths: list[int] = []

    def note(array: Any) -> Any:
        shape = getattr(array, "shape", ())
        if not shape:
            raise errors.InvalidData(
                f"a batch contains a {type(array).__name__} without a first dimension, so it cannot be divided between "
                "replicas; call batch(n) first, or give arrays whose first dimension is the samples"
            )
        lengths.append(shape[0])

    mapped(note, batch)
    if len(set(lengths)) != 1:
        raise errors.InvalidData(
            f"a batch has arrays of the lengths {sorted(set(lengths))}, so it cannot be divided between replicas; each "
            "array needs a row for every sample"
        )
    return lengths[0]


def sliced(batch: Any, start: int, stop: int) -> Any:
    """Returns some samples of a batch, as views.

    Args:
        batch: arrays, at any depth of tuples, lists and dicts.
        start: the first sample.
        stop: the sample after the last.
    """
    return mapped(lambda array: array[start:stop], batch)


def mapped(function: Callable[..., Any], value: Any, *others: Any) -> Any:
    """Returns the same structure of tuples, lists and dicts, with a function applied to each leaf.

    Args:
        function: takes a leaf of `value`, and the leaves of `others` at the same place.
        value: the structure.
        others: further values with the same structure.
    """
    match value:
        case dict():
            return {key: mapped(function, item, *(other[key] for other in others)) for key, item in value.items()}
        case tuple() | list():
            items = [mapped(function, *each) for each in zip(value, *others, strict=True)]
            named = type(value) is not tuple and isinstance(value, tuple)
            return type(value)(*items) if named else type(value)(items)
    return function(value, *others)


__all__ = ["even_sizes", "length_of", "mapped", "part_bounds", "sliced", "split_batch"]
