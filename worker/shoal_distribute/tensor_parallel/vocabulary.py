"""One device's part of a table of vectors: the look-up of its own rows, and the gradient of these rows."""

from collections.abc import Callable

import shoal_nn
from shoal.program import Array
from shoal_worker.arrays import namespace_of


def rows_of_part(table: Array, first: int, ids: Array) -> tuple[Array, Callable[[Array], Array]]:
    """Returns the vectors of the ids whose rows a part has, and 0 for the other ids.

    The sum over all parts is what the whole table has, with the same bits: all but one part add 0.

    Args:
        table: the part, [rows, width].
        first: number of its first row in the whole table.
        ids: integers of any shape.

    Returns:
        The vectors, [*ids.shape, width], and a function from their gradient to that of the part.
    """
    xp = namespace_of(table)
    rows, width = table.shape
    ids = ids.astype("int64", copy=False)  # the number of a row may not fit into the dtype of the ids
    own = (ids >= first) & (ids < first + rows)
    found, _, pull = shoal_nn.Embedding(rows, width).apply({"table": table}, {}, ids[own] - first, False)
    vectors = xp.zeros((*ids.shape, width), table.dtype)
    vectors[own] = found

    def pulled(dy: Array) -> Array:
        gradient: Array = pull(dy[own])[0]["table"]
        return gradient

    return vectors, pulled


__all__ = ["rows_of_part"]
