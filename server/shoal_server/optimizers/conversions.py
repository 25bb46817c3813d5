"""Conversions between the elements of messages and of arenas, with a check for NaN and Inf in the same pass.

Half-precision elements are converted by integer arithmetic on their bits, with the same results as NumPy and ml_dtypes.
The conversion instructions of processors change the payload of some NaN, and not all processors have such instructions.
Elements of a message may start at any byte, so arrays need not be aligned here.
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
from shoal_server.optimizers.kernel_threads import kernel_threads

# Flat arrays: target and source.
ArrayPair: TypeAlias = tuple[np.ndarray, np.ndarray]
Bits: TypeAlias = npt.NDArray[np.unsignedinteger[Any]]

_FLOAT16, _BFLOAT16, _FLOAT32 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32)
PIECE_ELEMENTS = 1 << 18  # elements that a thread converts at a time: 0.1 to 0.2 ms
LARGE_ELEMENTS = 1 << 22  # elements in total above which other threads help
_KEPT = (_FLOAT32, np.dtype(np.float64), np.dtype(np.int64))

# Numba widens a sum of 32-bit integers to 64 bits, which halves the elements per vector: hence all the np.uint32.
_1, _13, _16 = np.uint32(1), np.uint32(13), np.uint32(16)
_SIGN, _INFINITY = np.uint32(1 << 31), np.uint32(0xFF << 23)
_HALF_SIGN, _HALF_INFINITY, _HALF_FRACTION = np.uint32(1 << 15), np.uint32(0x1F << 10), np.uint32((1 << 10) - 1)
_BFLOAT_NAN = np.uint32(0x7FC0)
_BIAS = np.uint32((127 - 15) << 23)  # difference of the exponent biases of float32 and half, 13 bits to the left
# The smallest normal half, as half and as float32.
_HALF_NORMAL, _NORMAL = np.uint32(1 << 10), np.uint32((127 - 14) << 23)
_OVERFLOW = np.uint32((127 + 16) << 23)  # 2 ** 16, the first power of two beyond the halves
_STEP = np.float32(2**-24)  # spacing of the subnormal halves,
_RULER, _RULER_BITS = np.float32(0.5), np.uint32(126 << 23)  # and of float32s in [0.5, 1)


def _types(target: Any, source: Any) -> tuple[Any, Any]:
    return writable(target, aligned=False), readable(source, aligned=False)


@cache
def infinity_of(dtype: np.dtype) -> Any:
    """Returns the bits of a float type's infinity, as an unsigned integer of the same size: all exponent bits."""
    return np.full(1, np.inf, dtype).view(f"u{dtype.itemsize}")[0]


@kernel([(*_types(dtype, dtype), dtype) for dtype in (types.uint32, types.uint64)])
def _copy(target: Bits, source: Bits, infinity: Any) -> bool:
    found = False
    for i in range(target.size):
        # Read once: shared memory may change meanwhile, and the kept element must be the checked one.
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
        # 13 bits are dropped: round half to even.
        half = np.uint32(magnitude - _BIAS + np.uint32(0xFFF) + (np.uint32(magnitude >> _13) & _1)) >> _13
        if magnitude < _NORMAL:  # the addition rounds to a multiple of _STEP
            half = np.uint32(np.float32(magnitude.view(np.float32) + _RULER).view(np.uint32) - _RULER_BITS)
        if magnitude >= _OVERFLOW:
            half = _HALF_INFINITY
        if magnitude > _INFINITY:  # NaN: the top bits of its payload, and at least one bit
            payload = np.uint32(magnitude >> _13) & _HALF_FRACTION
            half = _HALF_INFINITY | max(payload, _1)
        target[i] = (np.uint32(bits >> _16) & _HALF_SIGN) | half


_WIDENED = {(_FLOAT32, _FLOAT16): _widen_half, (_FLOAT32, _BFLOAT16): _widen_bfloat}
_NARROWED = {(_FLOAT16, _FLOAT32): _narrow_half, (_BFLOAT16, _FLOAT32): _narrow_bfloat}


def receive(target: np.ndarray, source: np.ndarray) -> bool:
    """Copies received elements into an arena's memory, and returns whether all are finite.

    All elements are copied in any case: halves exactly, and NaN with its payload.

    Args:
        target: float32, float64 or int64; flat and contiguous, as is the source. Changed.
        source: of the same dtype and size, or float16 or bfloat16 for a float32 target. It must not overlap the target.
            It may start at any byte and be read-only. Each element is read once, so the memory may change meanwhile.

    Raises:
        ValueError: sizes or dtypes do not match. Nothing was changed.
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
    """Copies an arena's elements into a message: the inverse of `receive`.

    Halves are rounded to nearest, ties to even, as `astype` does; values beyond the largest half become infinite.

    Args:
        target: float32, float64 or int64, or float16 or bfloat16 for a float32 source; flat and contiguous, as is the
            source. It may start at any byte. Changed.
        source: of the same size and, except for halves, the same dtype. It must not overlap the target.

    Raises:
        ValueError: sizes or dtypes do not match. Nothing was changed.
    """
    _check(target, source, _NARROWED)
    if narrow := _NARROWED.get((target.dtype, source.dtype)):
        narrow(target.view(np.uint16), source.view(np.uint32))
    elif source.dtype == np.int64:
        np.copyto(target, source)
    else:  # 20% faster than memcpy for arrays beyond the caches
        infinity = infinity_of(source.dtype)
        _copy(target.view(infinity.dtype), source.view(infinity.dtype), infinity)


def receive_all(pairs: Sequence[ArrayPair]) -> int | None:
    """Calls `receive` for many pairs, on several threads if they are large. All pairs are copied.

    Returns:
        The index of the first pair with a NaN or infinite element; None if all are finite.

    Raises:
        ValueError: sizes or dtypes of a pair do not match. Nothing was changed.
    """
    for target, source in pairs:
        _check(target, source, _WIDENED)
    return min(_together(pairs, receive), default=None)


def send_all(pairs: Sequence[ArrayPair]) -> None:
    """Calls `send` for many pairs, on several threads if they are large.

    Raises:
        ValueError: sizes or dtypes of a pair do not match. Nothing was changed.
    """
    for target, source in pairs:
        _check(target, source, _NARROWED)

    def convert(target: np.ndarray, source: np.ndarray) -> bool:
        send(target, source)
        return True

    _together(pairs, convert)


def _together(pairs: Sequence[ArrayPair], convert: Callable[[np.ndarray, np.ndarray], bool]) -> set[int]:
    """Converts pairs; returns the indexes of those for which `convert` returned False.

    All pairs are cut into pieces first, and each thread takes the next piece, so no thread waits at the end of an
    arena.
    """
    pieces = deque(
        (index, target[start : start + PIECE_ELEMENTS], source[start : start + PIECE_ELEMENTS])
        for index, (target, source) in enumerate(pairs)
        for start in range(0, target.size, PIECE_ELEMENTS)
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

    large = sum(target.size for target, _ in pairs) >= LARGE_ELEMENTS
    return set().union(*kernel_threads().share(work)) if large else work()


def _check(target: np.ndarray, source: np.ndarray, converted: Collection[tuple[np.dtype, np.dtype]]) -> None:
    """Raises ValueError if a pair does not match. Kernels do not check sizes: a mismatch would write out of bounds."""
    known = (target.dtype, source.dtype) in converted or (target.dtype == source.dtype and source.dtype in _KEPT)
    flat = target.shape == source.shape and target.ndim == 1
    if not (known and flat and target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError(
            f"{source.dtype}{source.shape} cannot become {target.dtype}{target.shape}; arrays must be flat, contiguous "
            f"and of one size and dtype ({', '.join(map(str, _KEPT))}); only float32 has 16-bit types in messages"
        )
