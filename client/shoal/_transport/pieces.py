"""Lists of buffers for one system call: the first bytes of a list, and its rest after the call moved some bytes."""

from typing import Any


def first(pieces: list[memoryview], size: int) -> list[memoryview]:
    """Returns the first `size` bytes of some buffers."""
    found = []
    for piece in pieces:
        found.append(piece[:size])
        size -= len(found[-1])
        if not size:
            break
    return found


def rest(pieces: list[Any], moved: int) -> list[Any]:
    """Returns some buffers without their first `moved` bytes."""
    for index, piece in enumerate(pieces):
        if moved < len(piece):
            return [memoryview(piece)[moved:], *pieces[index + 1 :]]
        moved -= len(piece)
    return []


__all__ = ["first", "rest"]
