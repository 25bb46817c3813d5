"""The arithmetic of the server: one pass over memory for each update, compiled by Numba. No policy, no locks.

Arrays are flat, contiguous, aligned and all of one dtype, float32 or float64, and so are an update's scalars; sizes
are the caller's to check (`update_rules` does). Kernels run without the GIL on one thread, and the same inputs give the
same bits on every call. Half-precision gradients are widened to float32 before they come here.

An update runs over segments: elements [bounds[k], bounds[k + 1]) have weight decay decay[k]. So ten thousand variables
cost one call.

Compiled code is kept beside this file, or where that is read-only in the user's cache directory; the environment
variable NUMBA_CACHE_DIR overrides both. A container that can write to neither needs it, and gains from a directory that
outlives the process.
"""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba import types

F = TypeVar("F", bound=Callable[..., object])
Array: TypeAlias = npt.NDArray[np.floating[Any]]
Bounds: TypeAlias = npt.NDArray[np.int64]
Decay: TypeAlias = npt.NDArray[np.float64]
Scalar: TypeAlias = np.floating[Any]

# Of the fast-math flags only "contract" (a multiplication and an addition become one instruction). The others gain
# nothing here, where memory is the limit, and they may replace a division by an approximation that differs between
# processors, or assume that there is no NaN, which `all_finite` has to find.
_FAST_MATH = {"contract"}
_FLOATS = (types.float32, types.float64)
_UNSIGNED = (types.uint16, types.uint32, types.uint64)
_CACHE_LINE = 64  # bytes
_BLOCK = 1 << 14  # elements that all_finite reads before it asks whether to go on

_kernels: list[tuple[Any, list[tuple[Any, ...]]]] = []


def warm_up() -> float:
    """Compiles every kernel, or loads it from the cache, and returns the seconds that took.

    A server calls it before it serves: without it each kernel compiles at its first call. Afterwards a call with other
    types than the documented ones is a TypeError, where it would have compiled again.
    """
    started = time.perf_counter()
    for kernel, signatures in _kernels:
        for signature in set(signatures).difference(kernel.signatures):
            kernel.compile(signature)
        kernel.disable_compile()
    return time.perf_counter() - started


def _kernel(signatures: Sequence[tuple[Any, ...]]) -> Callable[[F], F]:
    """Compiles a function for these argument types at `warm_up`, and keeps the machine code on disk.

    Without error_model="numpy" a division may raise, and LLVM does not vectorise a loop that may.
    """

    def compiled(function: F) -> F:
        dispatcher: Any = numba.njit(nogil=True, fastmath=_FAST_MATH, error_model="numpy", cache=True)(function)
        _kernels.append((dispatcher, list(signatures)))
        return cast(F, dispatcher)

    return compiled


def _array(dtype: Any) -> Any:
    return types.Array(dtype, 1, "C")


def _input(dtype: Any) -> Any:
    """Takes arrays that may be written to as well: one signature for both."""
    return types.Array(dtype, 1, "C", readonly=True)


def _update(*, slots: int, optional_slots: int = 0, scalars: int, optional_scalars: int = 0) -> Callable[[F], F]:
    """A kernel of (values, gradient, slots, optional slots, bounds, decay, scalars, optional scalars).

    An optional one may be None, and each choice is compiled for itself: `if slot is not None` costs nothing.
    """
    segments = (_input(types.int64), _input(types.float64))
    signatures = []
    for dtype in _FLOATS:
        arena = (_array(dtype), _input(dtype), *[_array(dtype)] * slots)
        for some_slots in itertools.product((types.none, _array(dtype)), repeat=optional_slots):
            for some_scalars in itertools.product((types.none, dtype), repeat=optional_scalars):
                signatures.append((*arena, *some_slots, *segments, *[dtype] * scalars, *some_scalars))
    return _kernel(signatures)


# Numba knows no keyword-only arguments: everything goes by position. Each loop takes slices first: an index that counts
# from 0 into arena[bounds[k]:bounds[k + 1]] is never negative, and where LLVM cannot know that it tests for it at each
# element and does not vectorise.


@_update(slots=0, scalars=1)
def sgd(values: Array, gradient: Array, bounds: Bounds, decay: Decay, rate: Scalar) -> None:
    """`shoal.optim.SGD`."""
    for k in range(decay.size):
        cut = slice(bounds[k], bounds[k + 1])
        x, g = values[cut], gradient[cut]
        coupled = values.dtype.type(decay[k])
        for i in range(x.size):
            x[i] -= rate * (g[i] + coupled * x[i])


@_update(slots=1, scalars=4)
def momentum(
    values: Array,
    gradient: Array,
    momentum_buffer: Array,
    bounds: Bounds,
    decay: Decay,
    rate: Scalar,
    keep: Scalar,
    direct: Scalar,
    through: Scalar,
) -> None:
    """`shoal.optim.Momentum`: the step is direct * g + through * s; (0, 1), and (1, momentum) for Nesterov."""
    for k in range(decay.size):
        cut = slice(bounds[k], bounds[k + 1])
        x, g, s = values[cut], gradient[cut], momentum_buffer[cut]
        coupled = values.dtype.type(decay[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            s[i] = keep * s[i] + slope
            x[i] -= rate * (direct * slope + through * s[i])


@_update(slots=1, scalars=2)
def adagrad(
    values: Array, gradient: Array, accumulator: Array, bounds: Bounds, decay: Decay, rate: Scalar, eps: Scalar
) -> None:
    """`shoal.optim.Adagrad`."""
    for k in range(decay.size):
        cut = slice(bounds[k], bounds[k + 1])
        x, g, s = values[cut], gradient[cut], accumulator[cut]
        coupled = values.dtype.type(decay[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            s[i] += slope * slope
            x[i] -= rate * slope / (np.sqrt(s[i]) + eps)


@_update(slots=1, optional_slots=2, scalars=5)
def rmsprop(
    values: Array,
    gradient: Array,
    square_avg: Array,
    grad_avg: Array | None,
    momentum_buffer: Array | None,
    bounds: Bounds,
    decay: Decay,
    rate: Scalar,
    alpha: Scalar,
    rest: Scalar,
    eps: Scalar,
    keep: Scalar,
) -> None:
    """`shoal.optim.RMSProp`, centered if there is a grad_avg; rest = 1 - alpha, and keep is the momentum."""
    zero = values.dtype.type(0)
    for k in range(decay.size):
        cut = slice(bounds[k], bounds[k + 1])
        x, g, s = values[cut], gradient[cut], square_avg[cut]
        if grad_avg is not None:
            a = grad_avg[cut]
        if momentum_buffer is not None:
            b = momentum_buffer[cut]
        coupled = values.dtype.type(decay[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            s[i] = alpha * s[i] + rest * slope * slope
            variance = s[i]
            if grad_avg is not None:
                a[i] = alpha * a[i] + rest * slope
                variance = max(variance - a[i] * a[i], zero)
            step = slope / (np.sqrt(variance) + eps)
            if momentum_buffer is not None:
                b[i] = keep * b[i] + step
                step = b[i]
            x[i] -= rate * step


@_update(slots=2, scalars=9)
def adam(
    values: Array,
    gradient: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    bounds: Bounds,
    decay: Decay,
    step: Scalar,
    unbias: Scalar,
    beta1: Scalar,
    rest1: Scalar,
    beta2: Scalar,
    rest2: Scalar,
    eps: Scalar,
    couple: Scalar,
    shrink: Scalar,
) -> None:
    """`shoal.optim.Adam` and `AdamW`.

    step = lr / (1 - beta1 ** t), unbias = 1 / sqrt(1 - beta2 ** t), rest = 1 - beta: the caller has them in float64,
    where 1 - 0.999 keeps its digits; for their sake lr * decay is not taken from 1 here either. Weight decay is coupled
    for (couple, shrink) = (1, 0), decoupled for (0, lr).
    """
    for k in range(decay.size):
        cut = slice(bounds[k], bounds[k + 1])
        x, g, m, v = values[cut], gradient[cut], exp_avg[cut], exp_avg_sq[cut]
        coupled = couple * values.dtype.type(decay[k])
        shrunk = shrink * values.dtype.type(decay[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            m[i] = beta1 * m[i] + rest1 * slope
            v[i] = beta2 * v[i] + rest2 * slope * slope
            x[i] -= shrunk * x[i] + step * m[i] / (unbias * np.sqrt(v[i]) + eps)


@_update(slots=2, scalars=5, optional_scalars=1)
def ftrl(
    values: Array,
    gradient: Array,
    accumulator: Array,
    linear: Array,
    bounds: Bounds,
    decay: Decay,
    rate: Scalar,
    l1: Scalar,
    l2: Scalar,
    l2_shrinkage: Scalar,
    beta: Scalar,
    power: Scalar | None,
) -> None:
    """`shoal.optim.FTRL`; power None is 0.5, whose square roots vectorise, and whose difference loses no digits."""
    two = values.dtype.type(2)
    for k in range(decay.size):
        cut = slice(bounds[k], bounds[k + 1])
        x, g, n, z = values[cut], gradient[cut], accumulator[cut], linear[cut]
        shrunk = rate * values.dtype.type(decay[k])
        for i in range(x.size):
            value = x[i] - shrunk * x[i]
            square = g[i] * g[i]
            grown = n[i] + square
            if power is None:
                root = np.sqrt(grown)
                rise = square / (root + np.sqrt(n[i]))
            else:
                root = grown**power
                rise = root - n[i] ** power
            n[i] = grown
            z[i] += g[i] + two * l2_shrinkage * value - rise / rate * value
            pull = min(max(z[i], -l1), l1) - z[i]
            x[i] = pull / ((root + beta) / rate + two * l2)


@_kernel([(_array(dtype), _input(dtype), dtype) for dtype in _FLOATS])
def _accumulate(total: Array, gradient: Array, weight: Scalar) -> None:
    for i in range(total.size):
        total[i] += weight * gradient[i]


@_kernel([(_array(dtype), dtype) for dtype in _FLOATS])
def _scale(total: Array, factor: Scalar) -> None:
    for i in range(total.size):
        total[i] *= factor


@_kernel([(_input(dtype), dtype) for dtype in _UNSIGNED])
def _exponents_below(bits: npt.NDArray[Any], infinity: Any) -> bool:
    """Whether no element has all the bits of `infinity` set. Integers: no flag can make a compiler forget NaN."""
    for start in range(0, bits.size, _BLOCK):
        block = bits[start : start + _BLOCK]
        found = False
        for i in range(block.size):
            found |= (block[i] & infinity) == infinity
        if found:
            return False
    return True


def full(elements: int, fill: float, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """A flat array for an arena: it starts on a cache line, where NumPy's need not.

    Otherwise each 64-byte load and store of a kernel touches two lines: Adam takes a quarter longer.
    """
    size = elements * np.dtype(dtype).itemsize
    memory = np.empty(size + _CACHE_LINE, np.uint8)
    start = -memory.ctypes.data % _CACHE_LINE
    array = memory[start : start + size].view(dtype)
    array.fill(fill)
    return array


def accumulate(total: Array, gradient: Array, weight: float) -> None:
    """total := total + weight * gradient, element by element; ValueError if their shapes differ."""
    if total.shape != gradient.shape:
        raise ValueError(f"cannot add {gradient.shape} elements to {total.shape}")
    _accumulate(total, gradient, total.dtype.type(weight))


def scale(total: Array, factor: float) -> None:
    """total := factor * total."""
    _scale(total, total.dtype.type(factor))


def all_finite(x: npt.NDArray[Any]) -> bool:
    """Whether no element is NaN or infinite; stops at the first block that has one.

    Args:
        x: flat and contiguous; float16, bfloat16, float32, float64, or integers, which always are.
    """
    if np.issubdtype(x.dtype, np.integer):
        return True
    bits = x.view(f"u{x.dtype.itemsize}")
    infinity = np.full(1, np.inf, x.dtype).view(bits.dtype)[0]  # the exponent's bits and no others
    return bool(_exponents_below(bits, infinity))
