"""Arrays by name as flat arenas, and arenas as arrays again: what a client does with a placement.

How arenas travel is in `shoal._framing`.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from shoal import errors
from shoal._layout import Aggregation, ArenaLayout, Placement, ShardLayout, row_elements, rows_of
from shoal.variables import Variable

_MAX_COMPLAINTS = 50


@dataclass(frozen=True, slots=True)
class _Part:
    """A slice, with all that packing needs of it worked out."""

    variable: str
    rows: slice | None  # None: the whole variable
    shape: tuple[int, ...]
    elements: slice  # of the arena


class Packer:
    """Packs and unpacks by one placement. It never changes, so any number of threads can use it at once.

    Args:
        placement: where every slice lies.
    """

    def __init__(self, placement: Placement) -> None:
        self._variables = placement.variables
        self._parts = {
            shard.layout.shard: [_parts(arena, placement.variables) for arena in shard.layout.arenas]
            for shard in placement.shards
        }

    def empty(self) -> dict[str, np.ndarray]:
        """Uninitialised arrays for `unpack` to fill, one a variable, of its shape and dtype."""
        return {name: np.empty(variable.shape, variable.dtype) for name, variable in self._variables.items()}

    def check(self, arrays: Mapping[str, np.ndarray], aggregations: Collection[Aggregation]) -> None:
        """Checks that there is an array for every variable of some aggregations, and for no other.

        A scalar variable takes a number of Python or NumPy as well, if it is of the variable's kind.

        Raises:
            InvalidGradient: names, shapes or dtypes do not fit; the message lists all that do not (the first 50).
        """
        expected = {
            name: variable for name, variable in self._variables.items() if variable.aggregation in aggregations
        }
        complaints = [
            f"{name!r} {complaint}"
            for name, variable in expected.items()
            if (complaint := _complaint(arrays.get(name), variable))
        ]
        for name in arrays:
            if name not in expected:
                known = self._variables.get(name)
                what = f"is not to be sent here: it is {known.aggregation.name}" if known else "is not a variable"
                complaints.append(f"{name!r} {what}")
        if complaints:
            listed = "; ".join(complaints[:_MAX_COMPLAINTS])
            more = f"; and {len(complaints) - _MAX_COMPLAINTS:,} more" if len(complaints) > _MAX_COMPLAINTS else ""
            raise errors.InvalidGradient(f"the arrays do not fit the job's variables: {listed}{more}")

    def pack(
        self, layout: ShardLayout, arrays: Mapping[str, np.ndarray], aggregations: Collection[Aggregation]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """A shard's arenas of some aggregations, one after the other, so that one copy at a time is alive.

        Args:
            layout: of the shard.
            arrays: by variable, as `check` wants them.
            aggregations: the arenas to pack.

        Yields:
            An arena's index and its elements, 1-D and contiguous: a view of the array, not to be written to, where
            the arena is one contiguous slice; else a copy.
        """
        for index, (arena, parts) in enumerate(zip(layout.arenas, self._parts[layout.shard], strict=True)):
            if arena.aggregation not in aggregations:
                continue
            pieces = [
                arrays[part.variable] if part.rows is None else arrays[part.variable][part.rows] for part in parts
            ]
            if len(pieces) == 1:
                yield index, np.ascontiguousarray(pieces[0], arena.dtype).reshape(-1)
            else:
                # Flattens as it copies; only numbers for scalars are still cast here.
                flat = np.empty(arena.elements, arena.dtype)
                yield index, np.concatenate(pieces, axis=None, out=flat, casting="unsafe")

    def unpack(self, layout: ShardLayout, arena: int, flat: np.ndarray, out: Mapping[str, np.ndarray]) -> None:
        """Copies an arena's elements to their rows of the variables.

        Args:
            layout: of the shard.
            arena: its index.
            flat: its elements, 1-D.
            out: by variable, as `empty` makes them.
        """
        for part in self._parts[layout.shard][arena]:
            target = out[part.variable] if part.rows is None else out[part.variable][part.rows]
            target[...] = flat[part.elements].reshape(part.shape)


def _parts(arena: ArenaLayout, variables: Mapping[str, Variable]) -> list[_Part]:
    parts = []
    for piece in arena.slices:
        shape = variables[piece.variable].shape
        count = piece.row_stop - piece.row_start
        elements = slice(piece.offset, piece.offset + count * row_elements(shape))
        if count == rows_of(shape):
            parts.append(_Part(piece.variable, None, shape, elements))
        else:
            rows = slice(piece.row_start, piece.row_stop)
            parts.append(_Part(piece.variable, rows, (count, *shape[1:]), elements))
    return parts


def _complaint(array: object, variable: Variable) -> str:
    """What is wrong with an array for a variable; empty if nothing is."""
    if array is None:
        return "is missing"
    if isinstance(array, np.ndarray):
        if array.shape == variable.shape and array.dtype == variable.dtype:
            return ""
        wrong_shape = f"has shape {array.shape}, not {variable.shape}" if array.shape != variable.shape else ""
        wrong_dtype = f"is {array.dtype}: cast it to {variable.dtype}" if array.dtype != variable.dtype else ""
        return " and ".join(filter(None, (wrong_shape, wrong_dtype)))
    if not isinstance(array, int | float | np.generic):
        return f"is a {type(array).__name__}, not a NumPy array"
    if variable.shape:
        return f"is a number, not an array of shape {variable.shape}"
    dtype = np.asarray(array).dtype
    same_kind = dtype.kind == ("i" if variable.dtype.kind == "i" else "f")
    return "" if same_kind or dtype == variable.dtype else f"is {dtype}: cast it to {variable.dtype}"
