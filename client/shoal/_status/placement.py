"""Places of a job's variables on servers, as plain values."""

from collections.abc import Iterator
from dataclasses import dataclass

from shoal._wire import Placement, row_elements, rows_of


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows [start, stop) of a variable, which are in one shard.

    Attributes:
        variable: name of the variable.
        start: the first row. A scalar has one row.
        stop: the row after the last one.
        whole: whether these are all rows of the variable.
        nbytes: size of the values, in bytes, without the slots of the optimizer.
        shard: number of the shard.
        server: member id of the server that has the shard.
        address: host:port of that server.
    """

    variable: str
    start: int
    stop: int
    whole: bool
    nbytes: int
    shard: int
    server: str
    address: str


def placed_rows(placement: Placement) -> tuple[PlacedRows, ...]:
    """Returns the rows of all variables, in the order of the variables, and of the rows of each."""
    order = {name: index for index, name in enumerate(placement.variables)}
    return tuple(sorted(_rows(placement), key=lambda it: (order[it.variable], it.start)))


def _rows(placement: Placement) -> Iterator[PlacedRows]:
    for shard in placement.shards:
        for arena in shard.layout.arenas:
            for piece in arena.slices:
                shape, start, stop = placement.variables[piece.variable].shape, piece.row_start, piece.row_stop
                whole = stop - start == rows_of(shape)
                nbytes = (stop - start) * row_elements(shape) * arena.dtype.itemsize
                yield PlacedRows(
                    piece.variable, start, stop, whole, nbytes, shard.layout.shard, shard.server, shard.address
                )


__all__ = ["PlacedRows", "placed_rows"]
