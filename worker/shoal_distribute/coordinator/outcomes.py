"""Outcomes of scheduled calls, and their encoding: a tree of arrays and scalars, or the text of an error. No pickle.

An encoded tree is the length of a JSON text, the text, and the bytes of the arrays in the order of the text. In the
text, a container or an array is a list that begins with a letter; everything else stands for itself.
"""

import enum
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from shoal import errors
from shoal._wire import Buffer
from shoal._wire.limits import MAX_MESSAGE_BYTES
from shoal_distribute.values import PerReplica
from shoal_worker.arrays import on_host

# The largest encoded result: one frame carries it.
MAX_RESULT_BYTES = MAX_MESSAGE_BYTES - 64
_MAX_DEPTH, _MAX_DIMENSIONS = 50, 32
_MAX_TEXT = 64 << 10
_LENGTH = struct.Struct("<I")
_DTYPES = {
    dtype.name: dtype
    for dtype in map(
        np.dtype,
        (
            *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
            *("float16", "float32", "float64", "complex64", "complex128", ml_dtypes.bfloat16),
        ),
    )
}


class OutcomeKind(enum.IntEnum):
    """How a scheduled call ended."""

    VALUE = 1
    ERROR = 2  # the function raised an exception
    CANCELLED = 3  # another call failed before this one began
    DROPPED = 4  # it ended, but the chief does not keep its result any more


_ERRORS: dict[OutcomeKind, Callable[[str], errors.ShoalError]] = {
    OutcomeKind.ERROR: errors.ProgramError,
    OutcomeKind.CANCELLED: errors.Cancelled,
    OutcomeKind.DROPPED: errors.LimitExceeded,
}


@dataclass(frozen=True, slots=True)
class ScheduledOutcome:
    """How one scheduled call ended.

    Attributes:
        kind: what it ended with.
        payload: the encoded result, or the text of the error in UTF-8.
    """

    kind: OutcomeKind
    payload: bytes

    @classmethod
    def of_value(cls, value: Any) -> "ScheduledOutcome":
        """Returns the outcome of a call that has returned a value.

        Args:
            value: what `encode_tree` accepts.

        Raises:
            BadRequest, MessageTooLarge: see `encode_tree`.
        """
        return cls(OutcomeKind.VALUE, encode_tree(value))

    @classmethod
    def of_text(cls, kind: OutcomeKind, text: str) -> "ScheduledOutcome":
        """Returns the outcome of a call without a result.

        Args:
            kind: why it has none.
            text: the message of the error. Only its beginning is kept if it is very long.
        """
        return cls(kind, text.encode(errors="replace")[:_MAX_TEXT])

    @property
    def error(self) -> errors.ShoalError | None:
        """The error that stands for the outcome; None if there is a result."""
        made = _ERRORS.get(self.kind)
        return made(self.payload.decode(errors="replace")) if made else None

    def shortened(self, nbytes: int) -> "ScheduledOutcome":
        """Returns the outcome of an error with at most the first bytes of its text."""
        return ScheduledOutcome(self.kind, self.payload[:nbytes])

    def value(self) -> Any:
        """Returns the result, in new arrays.

        Raises:
            ProgramError: the function raised an exception. The message has its traceback.
            Cancelled: another call failed before this one began.
            LimitExceeded: the chief does not keep the result any more.
            BadFrame: the payload is no encoded tree.
        """
        if error := self.error:
            raise error
        return decode_tree(self.payload)


def encode_tree(value: Any) -> bytes:
    """Returns the encoding of a tree.

    Args:
        value: arrays of numbers, numbers, strings, None, and lists, tuples, dicts with strings as keys, and
            `PerReplica`s of them. An object with a method `numpy`, such as a variable, is encoded as the array that
            this method returns. Named tuples become tuples.

    Raises:
        BadRequest: it contains something else, or is nested too deeply.
        MessageTooLarge: the encoding has more than `MAX_RESULT_BYTES`.
    """
    arrays: list[np.ndarray] = []
    text = json.dumps(_described(value, arrays, 0), separators=(",", ":")).encode()
    size = _LENGTH.size + len(text) + sum(it.nbytes for it in arrays)
    if size > MAX_RESULT_BYTES:
        raise errors.MessageTooLarge(
            f"the result of a scheduled function has {size:,} bytes, but at most {MAX_RESULT_BYTES:,} can be returned; "
            "return less, such as a mean, or write the arrays to a file"
        )
    return b"".join([_LENGTH.pack(len(text)), text, *(it.tobytes() for it in arrays)])


def decode_tree(encoded: Buffer) -> Any:
    """Returns the tree, with new arrays.

    Args:
        encoded: what `encode_tree` returned.

    Raises:
        BadFrame: the bytes are no encoded tree.
    """
    view = memoryview(encoded)
    try:
        (length,) = _LENGTH.unpack(view[: _LENGTH.size])
        end = _LENGTH.size + length
        arrays = _ArrayBytes(view[end:])
        value = _built(json.loads(bytes(view[_LENGTH.size : end])), arrays)
        arrays.check_end()
    except (ValueError, TypeError, KeyError, IndexError, struct.error, RecursionError) as error:
        raise errors.BadFrame(f"{len(view)} bytes are not the result of a call: {error}") from None
    return value


class _ArrayBytes:
    """The bytes of all arrays, which are taken one after the other."""

    def __init__(self, view: memoryview) -> None:
        self._left = view

    def take(self, dtype: str, shape: list[int]) -> np.ndarray:
        found = _DTYPES[dtype]
        if len(shape) > _MAX_DIMENSIONS or any(type(it) is not int or it < 0 for it in shape):
            raise ValueError(f"{shape} is no shape")
        size = math.prod(shape) * found.itemsize
        if size > len(self._left):
            raise ValueError("an array is not complete")
        array = np.frombuffer(self._left[:size], found).reshape(shape).copy()
        self._left = self._left[size:]
        return array

    def check_end(self) -> None:
        if self._left:
            raise ValueError("there are more bytes than those of the arrays")


def _described(value: Any, arrays: list[np.ndarray], depth: int) -> Any:
    """Returns what JSON says of a tree, and adds its arrays to the list."""
    if depth > _MAX_DEPTH:
        raise errors.BadRequest(f"the result of a scheduled function is nested deeper than {_MAX_DEPTH} levels")
    inside = depth + 1
    match value:
        case None | bool() | str():
            return value
        case np.generic():
            return ["n", *_added(np.asarray(value), arrays)]
        case int() | float():
            return value
        case dict():
            if odd := [key for key in value if not isinstance(key, str)]:
                raise errors.BadRequest(
                    f"the result of a scheduled function has a dict with the key {odd[0]!r:.100}; use strings as keys"
                )
            return ["d", [[key, _described(item, arrays, inside)] for key, item in value.items()]]
        case list():
            return ["l", [_described(item, arrays, inside) for item in value]]
        case tuple():
            return ["t", [_described(item, arrays, inside) for item in value]]
        case PerReplica():
            return ["r", [_described(item, arrays, inside) for item in value.values]]
    if hasattr(value, "dtype") and hasattr(value, "shape") and not hasattr(value, "numpy"):
        return ["a", *_added(on_host(value), arrays)]
    if callable(convert := getattr(value, "numpy", None)):
        return ["a", *_added(np.asarray(convert()), arrays)]
    raise errors.BadRequest(
        f"a scheduled function returned a {type(value).__name__}; return arrays, numbers, strings, None, or lists, "
        "tuples and dicts of them"
    )


def _added(array: np.ndarray, arrays: list[np.ndarray]) -> tuple[str, list[int]]:
    if array.dtype.name not in _DTYPES:
        raise errors.BadRequest(
            f"a scheduled function returned an array of {array.dtype}; return arrays of {', '.join(_DTYPES)}"
        )
    arrays.append(array)
    return array.dtype.name, list(array.shape)


def _built(described: Any, arrays: _ArrayBytes) -> Any:
    match described:
        case ["a", dtype, shape]:
            return arrays.take(dtype, shape)
        case ["n", dtype, []]:
            return arrays.take(dtype, [])[()]
        case ["d", items]:
            return {str(key): _built(item, arrays) for key, item in items}
        case ["l", items]:
            return [_built(item, arrays) for item in items]
        case ["t", items]:
            return tuple(_built(item, arrays) for item in items)
        case ["r", items]:
            return PerReplica([_built(item, arrays) for item in items])
        case None | bool() | str() | int() | float():
            return described
    raise ValueError(f"{described!r:.100} describes nothing")


__all__ = ["MAX_RESULT_BYTES", "OutcomeKind", "ScheduledOutcome", "decode_tree", "encode_tree"]
