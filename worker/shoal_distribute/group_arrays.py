"""Arrays of the processes of a group: reduced in few calls, and gathered along an axis."""

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np

from shoal_distribute.collectives import Group

# An array of this size is not packed: its copy takes longer than another call.
_LARGE_BYTES = 1 << 20


class Packing:
    """Arrays packed into few flat ones, because each collective call costs a round trip.

    Small arrays of one dtype share a flat array. A large one is a flat array of its own.

    Args:
        kinds: shape and dtype of each array.
    """

    def __init__(self, kinds: Iterable[tuple[tuple[int, ...], np.dtype]]) -> None:
        self._kinds = list(kinds)
        together: dict[object, list[int]] = defaultdict(list)
        for number, (shape, dtype) in enumerate(self._kinds):
            large = math.prod(shape) * dtype.itemsize >= _LARGE_BYTES
            together[number if large else dtype].append(number)
        self._together = list(together.values())

    def empty(self) -> list[np.ndarray]:
        """Returns flat arrays with undefined content."""
        sizes = [sum(math.prod(self._kinds[it][0]) for it in numbers) for numbers in self._together]
        return [np.empty(size, self._kinds[it[0]][1]) for size, it in zip(sizes, self._together, strict=True)]

    def parts(self, flats: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns the arrays, as views of flat ones."""
        found: dict[int, np.ndarray] = {}
        for flat, numbers in zip(flats, self._together, strict=True):
            end = 0
            for number in numbers:
                shape, _ = self._kinds[number]
                begin, end = end, end + math.prod(shape)
                found[number] = flat[begin:end].reshape(shape)
        return [found[number] for number in range(len(self._kinds))]


def sums_of(group: Group, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the sums of the arrays of all processes, in few calls.

    Args:
        group: the group, whose processes all call it.
        arrays: this process's arrays, in the shapes and dtypes of the others.

    Returns:
        New arrays.
    """
    kinds = [(it.shape, it.dtype) for it in arrays]
    packing, layout = Packing(kinds), [(shape, dtype.name) for shape, dtype in kinds]
    flats = packing.empty()
    results = packing.parts(flats)
    for result, array in zip(results, arrays, strict=True):
        result[...] = array
    for flat in flats:
        group.all_reduce(flat, layout=layout)
    return results


def gathered(group: Group, array: np.ndarray, axis: int) -> np.ndarray:
    """Returns the arrays of all processes one after the other along an axis, which may have another length in each.

    Args:
        group: the group, whose processes all call it.
        array: this process's array.
        axis: the axis.
    """
    moved = np.moveaxis(array, axis, 0)
    lengths = [int(it) for it in group.all_gather(np.array(len(moved), np.int64))]
    padded = np.zeros((max(lengths), *moved.shape[1:]), moved.dtype)
    padded[: len(moved)] = moved
    parts = [part[:length] for part, length in zip(group.all_gather(padded), lengths, strict=True)]
    return np.moveaxis(np.concatenate(parts), 0, axis)


def bytes_from(group: Group, root: int, data: bytes) -> bytes:
    """Returns the bytes of one process, whose number the others do not know.

    Args:
        group: the group, whose processes all call it.
        root: the rank whose bytes all get.
        data: the bytes of that rank; those of others are not used.
    """
    length = int(group.broadcast(np.array([len(data)]), root)[0])
    own = group.rank == root
    return group.broadcast(np.frombuffer(data, np.uint8).copy() if own else np.empty(length, np.uint8), root).tobytes()


__all__ = ["Packing", "bytes_from", "gathered", "sums_of"]
