"""Between a message's elements and an arena's: one pass that copies or converts, and looks for NaN and Inf on arrival.

Halves are converted by arithmetic on their bits, to the bit as NumPy and ml_dtypes do it one by one: the instructions
for it change the payload of some NaN, and not all processors have them. Elements of a message may start at any byte, so
here arrays need not be aligned.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import cache
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numba import types

from shoal_server.optimizers.compilation import kernel, readable, writable
from shoal_server.optimizers.kernel_threads import crew

# Flat arrays: a target, and its source.
Pair: TypeAlias = tuple[np.ndarray, np.ndarray]
Bits: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_FLOAT16, _BFLOAT16, _FLOAT32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
_PIECE = 1 << 18  # elements that a thread converts at a time: a tenth of a millisecond or two
_LARGE = 1 << 22  # elements, in all, from which on helpers are asked
_KEPT = (_FLOAT32, np.dtype(np.float64), np.dtype(np.int64))

# Numba takes a sum of 32-bit integers as one of 64 bits, and half as many fit a vector: hence all the np.uint32.
_1, _13, _16 = np.uint32(1), np.uint32(13), np.uint32(16)
_SIGN, _INFINITY = np.uint32(1 << 31), np.uint32(0xFF << 23)
_HALF_SIGN, _HALF_INFINITY, _HALF_FRACTION = np.uint32(1 << 15), np.uint32(0x1F << 10), np.uint32((1 << 10) - 1)
_BFLOAT_NAN = np.uint32(0x7FC0)
_BIAS = np.uint32((127 - 15) << 23)  # what a float32's exponent has more than a half's, 13 bits to the left
_HALF_NORMAL, _NORMAL = np.uint32(1 << 10), np.uint32((127 - 14) << 23)  # the smallest normal half, as each
_OVERFLOW = np.uint32((127 + 16) << 23)  # 2 ** 16, beyond what halves have
_STEP = np.float32(2**-24)  # between halves that are smaller than that,
_RULER, _RULER_BITS = np.float32(0.5), np.uint32(126 << 23)  # and between float32s from here up


def _types(target: Any, source: Any) -> tuple[Any, Any]:
    return writable(target, aligned=False), readable(source, aligned=False)


@cache
def infinity_of(dtype: np.dtype) -> Any:
    """The bits of a float type's infinity, as an unsigned integer of its size: those of the exponent and no others."""
    return np.full(1, np.inf, dtype).view(f"u{dtype.itemsize}")[0]


@kernel([(*_types(dtype, dtype), dtype) for dtype in (types.uint32, types.uint64)])
def _copy(target: Bits, source: Bits, infinity: Any) -> bool:
    found = False
    for i in range(target.size):
        # Read once: memory that is shared may change meanwhile, and what is kept has to be what was checked.
        bits = source[i]
        target[i] = bits
        found |= (bits & infinity) == infinity
    return not found


@kernel([_types(types.uint32, types.uint16)])
def _widen_bfloat(target: Bits, source: Bits) -> bool:
    found = False
    for i in range(target.size):
        bits = np.uint32(source[i]) << _16
        target[i] = bits
        found |= (bits & _INFINITY) == _INFINITY
    return not found


@kernel([_types(types.uint32, types.uint16)])
def _widen_half(target: Bits, source: Bits) -> bool:
    found = False
    for i in range(target.size):
        half = np.uint32(source[i])
        sign, magnitude = half & _HALF_SIGN, np.uint32(half & ~_HALF_SIGN)
        bits = np.uint32((magnitude << _13) + _BIAS)
        if magnitude < _HALF_NORMAL:
            bits = np.float32(np.float32(np.int32(magnitude)) * _STEP).view(np.uint32)
        if magnitude >= _HALF_INFINITY:
            bits = np.uint32(bits + _BIAS)
            found = True
        target[i] = (sign << _16) | bits
    return not found


@kernel([_types(types.uint16, types.uint32)])
def _narrow_bfloat(target: Bits, source: Bits) -> None:
    for i in range(target.size):
        bits = np.uint32(source[i])
        top = np.uint32(bits >> _16)
        rounded = np.uint32(bits + np.uint32(0x7FFF) + (top & _1)) >> _16
        target[i] = (top & _HALF_SIGN) | _BFLOAT_NAN if (bits & ~_SIGN) > _INFINITY else rounded


@kernel([_types(types.uint16, types.uint32)])
def _narrow_half(target: Bits, source: Bits) -> None:
    for i in range(target.size):
        bits = np.uint32(source[i])
        magnitude = np.uint32(bits & ~_SIGN)
        # 13 bits go: up by just less than half of what is kept, and by the rest if that is odd.
        half = np.uint32(magnitude - _BIAS + np.uint32(0xFFF) + (np.uint32(magnitude >> _13) & _1)) >> _13
        if magnitude < _NORMAL:  # the sum is rounded to a step
            half = np.uint32(np.float32(magnitude.view(np.float32) + _RULER).view(np.uint32) - _RULER_BITS)
        if magnitude >= _OVERFLOW:
            half = _HALF_INFINITY
        if magnitude > _INFINITY:  # NaN, with as much of its payload as there is room for, and never none
            payload = np.uint32(magnitude >> _13) & _HALF_FRACTION
            half = _HALF_INFINITY | max(payload, _1)
        target[i] = (np.uint32(bits >> _16) & _HALF_SIGN) | half


_WIDENED = {(_FLOAT32, _FLOAT16): _widen_half, (_FLOAT32, _BFLOAT16): _widen_bfloat}
_NARROWED = {(_FLOAT16, _FLOAT32): _narrow_half, (_BFLOAT16, _FLOAT32): _narrow_bfloat}


def receive(target: np.ndarray, source: np.ndarray) -> bool:
    """Copies what has arrived to where it is kept, and says whether no element is NaN or infinite.

    All of it is copied, whatever it holds: halves exactly, and NaN with its payload.

    Args:
        target: float32, float64 or int64; flat and contiguous, as is the source. Changed.
        source: of the same dtype and size; or float16 or bfloat16 for a target of float32. At any byte, read-only or
            not, and no part of the target. Each element is read once, so it may be in memory that another writes to.

    Raises:
        ValueError: sizes or dtypes do not go together. Nothing was changed.
    """
    _check(target, source, _WIDENED)
    if widen := _WIDENED.get((target.dtype, source.dtype)):
        return bool(widen(target.view(np.uint32), source.view(np.uint16)))
    if source.dtype == np.int64:
        np.copyto(target, source)
        return True
    infinity = infinity_of(source.dtype)
    return bool(_copy(target.view(infinity.dtype), source.view(infinity.dtype), infinity))


def send(target: np.ndarray, source: np.ndarray) -> None:
    """Copies what is kept to where it is sent from: the inverse of `receive`.

    Halves are rounded to the nearest and to the even one of two, as `astype` rounds them: to infinity beyond the
    largest.

    Args:
        target: float32, float64 or int64, or float16 or bfloat16 for a source of float32; flat and contiguous, as is
            the source. At any byte; changed.
        source: of the same dtype, but for halves, and size; no part of the target.

    Raises:
        ValueError: sizes or dtypes do not go together. Nothing was changed.
    """
    _check(target, source, _NARROWED)
    if narrow := _NARROWED.get((target.dtype, source.dtype)):
        narrow(target.view(np.uint16), source.view(np.uint32))
    elif source.dtype == np.int64:
        np.copyto(target, source)
    else:  # in four fifths of memcpy's time, where there are more than the caches hold
        infinity = infinity_of(source.dtype)
        _copy(target.view(infinity.dtype), source.view(infinity.dtype), infinity)


def receive_all(pairs: Sequence[Pair]) -> int | None:
    """`receive` of many, with the help of idle cores if they are large.

    Returns:
        The index of the first that has an element that is NaN or infinite; None: all are finite. All are copied.

    Raises:
        ValueError: sizes or dtypes of a pair do not go together. Nothing was changed.
    """
    for target, source in pairs:
        _check(target, source, _WIDENED)
    return min(_together(pairs, receive), default=None)


def send_all(pairs: Sequence[Pair]) -> None:
    """`send` of many, likewise."""
    for target, source in pairs:
        _check(target, source, _NARROWED)

    def convert(target: np.ndarray, source: np.ndarray) -> bool:
        send(target, source)
        return True

    _together(pairs, convert)


def _together(pairs: Sequence[Pair], convert: Callable[[np.ndarray, np.ndarray], bool]) -> set[int]:
    """Converts pairs; the indexes of those of which `convert` says False anywhere.

    All of them are cut before the first is converted, and threads take whatever piece is next: nobody waits at the end
    of each arena.
    """
    pieces = deque(
        (index, target[start : start + _PIECE], source[start : start + _PIECE])
        for index, (target, source) in enumerate(pairs)
        for start in range(0, target.size, _PIECE)
    )

    def work() -> set[int]:
        found: set[int] = set()
        while True:
            try:
                index, target, source = pieces.popleft()
            except IndexError:
                return found
            if not convert(target, source):
                found.add(index)

    large = sum(target.size for target, _ in pairs) >= _LARGE
    return set().union(*crew().share(work)) if large else work()


def _check(target: np.ndarray, source: np.ndarray, converted: Collection[tuple[np.dtype, np.dtype]]) -> None:
    """Kernels trust their sizes, so a mismatch here would be a stray write there."""
    known = (target.dtype, source.dtype) in converted or (target.dtype == source.dtype and source.dtype in _KEPT)
    flat = target.shape == source.shape and target.ndim == 1
    if not (known and flat and target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError(
            f"{source.dtype}{source.shape} cannot become {target.dtype}{target.shape}; arrays are flat, contiguous and "
            f"of one size, and both {', '.join(map(str, _KEPT))}, but for a half on the message's side of a float32"
        )
