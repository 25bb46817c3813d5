"""Calls: the properties of a collective call that must be the same on all ranks of a group, and their encoding."""

import enum
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal import errors

_CALL = struct.Struct("<QBB16sQII")


class ReduceOp(enum.Enum):
    """How the arrays of all ranks become one.

    SUM adds them. MEAN also divides by the number of ranks, and takes floating-point arrays only.
    """

    SUM = "sum"
    MEAN = "mean"

    def finish(self, total: np.ndarray[Any, Any], ranks: int) -> None:
        """Turns the sum of all ranks' arrays into the result, in place.

        Args:
            total: the sum, or a part of it. One rank alone finishes each element, so that all get the same bits.
            ranks: number of ranks.
        """
        if self is ReduceOp.MEAN:
            np.multiply(total, total.dtype.type(1 / ranks), out=total)


class Collective(enum.Enum):
    """The kinds of collective call."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"
    BARRIER = "barrier"
    AGREE = "agree"


_COLLECTIVES, _OPS = tuple(Collective), tuple(ReduceOp)


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective call, as each rank sees it.

    Attributes:
        number: its place in the order of the group's calls, from 0.
        collective: its kind.
        dtype: NumPy's name of the array's dtype; "" without an array.
        elements: number of elements of the array.
        op: how arrays are reduced; SUM for calls that reduce nothing.
        root: the rank whose array is broadcast; 0 for other calls.
        layout: checksum of the array's shape, or of what the caller says of its elements; see `layout_of`.
    """

    number: int
    collective: Collective
    dtype: str = ""
    elements: int = 0
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    layout: int = 0

    def __str__(self) -> str:
        of = f" of {self.elements:,} {self.dtype}" if self.dtype else ""
        by = f" by {self.op.value}" if self.collective in {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER} else ""
        source = f" from rank {self.root}" if self.collective is Collective.BROADCAST else ""
        return f"{self.collective.value}{of}{by}{source} as its call {self.number}"

    def encode(self) -> bytes:
        """Returns the bytes that tell another rank of this call."""
        kind, op = _COLLECTIVES.index(self.collective), _OPS.index(self.op)
        return _CALL.pack(self.number, kind, op, self.dtype.encode(), self.elements, self.root, self.layout)

    @classmethod
    def decode(cls, data: bytes) -> "CollectiveCall":
        """Returns the call that another rank has told of.

        Raises:
            BadFrame: the bytes are no call.
        """
        try:
            number, kind, op, dtype, elements, root, layout = _CALL.unpack(data)
            name = dtype.rstrip(b"\0").decode("ascii")
            return cls(number, _COLLECTIVES[kind], name, elements, _OPS[op], root, layout)
        except (struct.error, IndexError, UnicodeDecodeError) as error:
            raise errors.BadFrame(f"{len(data)} bytes are not a collective call: {error}") from None


def layout_of(told: object) -> int:
    """Returns a checksum of an array's shape, or of the shapes and dtypes of the arrays that it packs."""
    return zlib.crc32(repr(told).encode())


__all__ = ["Collective", "CollectiveCall", "ReduceOp", "layout_of"]
