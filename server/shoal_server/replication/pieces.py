"""Pieces of arrays on a replica's connection: each is a message with its place, and elements of the array."""

import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress

import numpy as np
from google.protobuf.message import DecodeError

from shoal import errors
from shoal._transport import Connection
from shoal._wire import Buffer
from shoal.v1 import replica_pb2

_SIZE = struct.Struct("<I")
# Bytes of elements in one frame. More of them make fewer calls, and inputs wait for a frame.
PIECE_BYTES = 1 << 20
_MOST_PLACE_BYTES = 256
# Of the arrays in a region, and of regions.
_ALIGNMENT, _PAGE = 64, 4096


def pieces_of(array: np.ndarray, *, gradient: int, slab: int, slot: str = "") -> Iterator[list[Buffer]]:
    """Yields the payloads of the frames that carry a flat array. They are views of the array.

    Args:
        array: the array.
        gradient, slab, slot: as in `ArrayPiece`.
    """
    step = PIECE_BYTES // array.dtype.itemsize
    for start in range(0, array.size, step):
        place = replica_pb2.ArrayPiece(gradient=gradient, slab=slab, slot=slot, start=start).SerializeToString()
        yield [_SIZE.pack(len(place)), place, array[start : start + step].data.cast("B")]


def shared_piece(*, gradient: int, slab: int, region: int) -> list[Buffer]:
    """Returns the payload of a frame that names an array in shared memory.

    Args:
        gradient, slab, region: as in `ArrayPiece`.
    """
    place = replica_pb2.ArrayPiece(gradient=gradient, slab=slab, region=region).SerializeToString()
    return [_SIZE.pack(len(place)), place]


def received_place(lane: Connection) -> tuple[replica_pb2.ArrayPiece, int]:
    """Reads the place of a piece whose frame has begun.

    Returns:
        The place, and the bytes of the frame before the elements, for `Connection.fill`.

    Raises:
        BadFrame: it cannot be read.
    """
    head = lane.peek(_SIZE.size)
    if len(head) == _SIZE.size and (size := _SIZE.unpack(head)[0]) <= _MOST_PLACE_BYTES:
        taken, place = _SIZE.size + size, lane.peek(_SIZE.size + size)
        with suppress(DecodeError):
            if len(place) == taken:
                return replica_pb2.ArrayPiece.FromString(bytes(place[_SIZE.size :])), taken
    raise errors.BadFrame(f"{lane.peer} sent a piece of an array that cannot be read")


def fill(lane: Connection, taken: int, array: np.ndarray, start: int) -> int:
    """Receives the elements of a piece into a flat array.

    Args:
        lane: the connection, after `received_place`.
        taken: bytes before the elements.
        array: the array.
        start: its first element to fill.

    Returns:
        The number of elements.

    Raises:
        BadFrame: the elements do not fit.
    """
    elements, rest = divmod(lane.left - taken, array.dtype.itemsize)
    if rest or start + elements > array.size:
        raise errors.BadFrame(
            f"{lane.peer} sent {lane.left - taken} bytes for element {start} of an array of {array.size} elements of "
            f"{array.dtype}"
        )
    target = array[start : start + elements]
    lane.fill(taken, [target.data.cast("B")])
    return elements


class RegionLayout:
    """The places of slabs in a region of shared memory.

    Args:
        arrays: an array of each slab, with its size and dtype.

    Attributes:
        nbytes: size of a region.
    """

    def __init__(self, arrays: Iterable[np.ndarray]) -> None:
        self._places: list[tuple[int, int, np.dtype]] = []
        start = 0
        for array in arrays:
            self._places.append((start, start + array.nbytes, array.dtype))
            start = -(-(start + array.nbytes) // _ALIGNMENT) * _ALIGNMENT
        self.nbytes = -(-start // _PAGE) * _PAGE

    def array(self, region: np.ndarray, slab: int) -> np.ndarray:
        """Returns the array of a slab in a region.

        Args:
            region: the region's bytes.
            slab: index of the slab.

        Raises:
            BadFrame: the region is too small.
        """
        start, stop, dtype = self._places[slab]
        if stop > region.size:
            raise errors.BadFrame(f"a region of {region.size} bytes is too small for a gradient of {self.nbytes} bytes")
        return region[start:stop].view(dtype)


__all__ = ["PIECE_BYTES", "RegionLayout", "fill", "pieces_of", "received_place", "shared_piece"]
