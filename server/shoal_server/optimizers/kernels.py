"""The arithmetic of the server: one pass over memory for each update, compiled by Numba. No policy, no locks.

Arrays are flat, contiguous, aligned and all of one dtype, float32 or float64, and so are an update's scalars; sizes
are the caller's to check (`update_rules` does). Kernels run without the GIL, and the same inputs give the same bits on
every call, on however many threads. Half-precision gradients are widened to float32 before they come here.

An update runs over segments: elements [bounds[k], bounds[k + 1]) have weight decay decay[k]. So ten thousand variables
cost one call. Threads that call a kernel with the same claims share the arena: each claims the next block until there
is none left. A claim is one atomic addition in compiled code, so a thread takes the interpreter's lock once a call and
not once a block. Each element is computed by itself: whoever does it, the bits are the same.

How kernels are compiled is in `compilation`; what converts a message's elements, in `conversions`; who helps, in
`kernel_threads`. What is compiled into a kernel is in the kernel's own file, or Numba would not see that it changed.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic

from shoal_server.optimizers.compilation import (
    CLAIMS,
    FLOATS,
    compiled,
    kernel,
    processor,
    readable,
    update,
    warm_up,
    writable,
)
from shoal_server.optimizers.conversions import infinity_of
from shoal_server.optimizers.kernel_threads import crew

__all__ = [
    "accumulate",
    "adagrad",
    "adam",
    "all_finite",
    "ftrl",
    "momentum",
    "processor",
    "rmsprop",
    "scale",
    "sgd",
    "share",
    "warm_up",
]

T = TypeVar("T")
Array: TypeAlias = npt.NDArray[np.floating[Any]]
Bounds: TypeAlias = npt.NDArray[np.int64]
Decay: TypeAlias = npt.NDArray[np.float64]
Scalar: TypeAlias = np.floating[Any]
Claims: TypeAlias = npt.NDArray[np.int64]  # [the first element that nobody has claimed, the end]

BLOCK = 1 << 17  # elements: 0.1 ms of work, so that nobody waits long for whoever has the last one
LARGE = 1 << 22  # elements, from which on helpers are asked: that costs 0.1 ms, and there are then 2 ms to share

_UNSIGNED = (types.uint16, types.uint32, types.uint64)


def _claim(_context: Any, claims: Any, _elements: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, arguments[0])
        # It brings no other memory in order: threads meet at the crew's lock before and after.
        return builder.atomic_rmw("add", array.data, arguments[1], "monotonic")

    return types.int64(claims, types.int64), generate


# In compiled code: _take(claims, elements) is the first of so many elements that are now the caller's alone.
_take: Any = intrinsic(_claim)


@compiled
def _blocks(claims: Claims) -> Iterator[tuple[int, int]]:
    """The blocks [start, stop) that this thread has claimed, one after the other."""
    end = claims[1]
    start = _take(claims, BLOCK)
    while start < end:
        yield start, min(start + BLOCK, end)
        start = _take(claims, BLOCK)


@compiled
def _runs(bounds: Bounds, claims: Claims) -> Iterator[tuple[int, int, int]]:
    """The same in parts (k, start, stop), each within segment k, which is [bounds[k], bounds[k + 1]).

    The segments cover all that can be claimed. `_blocks` once more, for a generator within another costs a third more
    time to compile, in each kernel.
    """
    k = 0  # a thread's later blocks lie behind its earlier ones
    end = claims[1]
    start = _take(claims, BLOCK)
    while start < end:
        block_end = min(start + BLOCK, end)
        while start < block_end:
            while bounds[k + 1] <= start:
                k += 1
            stop = min(bounds[k + 1], block_end)
            yield k, start, stop
            start = stop
        start = _take(claims, BLOCK)


# Numba knows no keyword-only arguments: everything goes by position. Each loop takes slices first: an index that counts
# from 0 into arena[start:stop] is never negative, and where LLVM cannot know that it tests for it at each element and
# does not vectorise.


@update(slots=0, scalars=1)
def sgd(values: Array, gradient: Array, bounds: Bounds, decay: Decay, claims: Claims, rate: Scalar) -> None:
    """`shoal.optim.SGD`."""
    for k, start, stop in _runs(bounds, claims):
        cut = slice(start, stop)
        x, g = values[cut], gradient[cut]
        coupled = values.dtype.type(decay[k])
        for i in range(x.size):
            x[i] -= rate * (g[i] + coupled * x[i])


@update(slots=1, scalars=4)
def momentum(
    values: Array,
    gradient: Array,
    momentum_buffer: Array,
    bounds: Bounds,
    decay: Decay,
    claims: Claims,
    rate: Scalar,
    keep: Scalar,
    direct: Scalar,
    through: Scalar,
) -> None:
    """`shoal.optim.Momentum`: the step is direct * g + through * s; (0, 1), and (1, momentum) for Nesterov."""
    for k, start, stop in _runs(bounds, claims):
        cut = slice(start, stop)
        x, g, s = values[cut], gradient[cut], momentum_buffer[cut]
        coupled = values.dtype.type(decay[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            s[i] = keep * s[i] + slope
            x[i] -= rate * (direct * slope + through * s[i])


@update(slots=1, scalars=2)
def adagrad(
    values: Array,
    gradient: Array,
    accumulator: Array,
    bounds: Bounds,
    decay: Decay,
    claims: Claims,
    rate: Scalar,
    eps: Scalar,
) -> None:
    """`shoal.optim.Adagrad`."""
    for k, start, stop in _runs(bounds, claims):
        cut = slice(start, stop)
        x, g, s = values[cut], gradient[cut], accumulator[cut]
        coupled = values.dtype.type(decay[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            s[i] += slope * slope
            x[i] -= rate * slope / (np.sqrt(s[i]) + eps)


@update(slots=1, optional_slots=2, scalars=5)
def rmsprop(
    values: Array,
    gradient: Array,
    square_avg: Array,
    grad_avg: Array | None,
    momentum_buffer: Array | None,
    bounds: Bounds,
    decay: Decay,
    claims: Claims,
    rate: Scalar,
    alpha: Scalar,
    rest: Scalar,
    eps: Scalar,
    keep: Scalar,
) -> None:
    """`shoal.optim.RMSProp`, centered if there is a grad_avg; rest = 1 - alpha, and keep is the momentum."""
    zero = values.dtype.type(0)
    for k, start, stop in _runs(bounds, claims):
        cut = slice(start, stop)
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


@update(slots=2, scalars=9)
def adam(
    values: Array,
    gradient: Array,
    exp_avg: Array,
    exp_avg_sq: Array,
    bounds: Bounds,
    decay: Decay,
    claims: Claims,
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
    for k, start, stop in _runs(bounds, claims):
        cut = slice(start, stop)
        x, g, m, v = values[cut], gradient[cut], exp_avg[cut], exp_avg_sq[cut]
        coupled = couple * values.dtype.type(decay[k])
        shrunk = shrink * values.dtype.type(decay[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            m[i] = beta1 * m[i] + rest1 * slope
            v[i] = beta2 * v[i] + rest2 * slope * slope
            x[i] -= shrunk * x[i] + step * m[i] / (unbias * np.sqrt(v[i]) + eps)


@update(slots=2, scalars=5, optional_scalars=1)
def ftrl(
    values: Array,
    gradient: Array,
    accumulator: Array,
    linear: Array,
    bounds: Bounds,
    decay: Decay,
    claims: Claims,
    rate: Scalar,
    l1: Scalar,
    l2: Scalar,
    l2_shrinkage: Scalar,
    beta: Scalar,
    power: Scalar | None,
) -> None:
    """`shoal.optim.FTRL`; power None is 0.5, whose square roots vectorise, and whose difference loses no digits."""
    two = values.dtype.type(2)
    for k, start, stop in _runs(bounds, claims):
        cut = slice(start, stop)
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


@kernel([(writable(dtype), readable(dtype), dtype, CLAIMS) for dtype in FLOATS])
def _accumulate(total: Array, gradient: Array, weight: Scalar, claims: Claims) -> None:
    for start, stop in _blocks(claims):
        t, g = total[start:stop], gradient[start:stop]
        for i in range(t.size):
            t[i] += weight * g[i]


@kernel([(writable(dtype), dtype, CLAIMS) for dtype in FLOATS])
def _scale(total: Array, factor: Scalar, claims: Claims) -> None:
    for start, stop in _blocks(claims):
        t = total[start:stop]
        for i in range(t.size):
            t[i] *= factor


@kernel([(readable(dtype), dtype, CLAIMS) for dtype in _UNSIGNED])
def _exponents_below(bits: npt.NDArray[Any], infinity: Any, claims: Claims) -> bool:
    """Whether no element claimed has all the bits of `infinity` set; whoever finds one leaves the others none to claim.

    Integers: no flag can make a compiler forget NaN.
    """
    for start, stop in _blocks(claims):
        block = bits[start:stop]
        found = False
        for i in range(block.size):
            found |= (block[i] & infinity) == infinity
        if found:
            _take(claims, bits.size)
            return False
    return True


def share(elements: int, work: Callable[[Claims], T]) -> list[T]:
    """Runs a kernel over an arena, with the help of idle cores if it is large.

    Args:
        elements: of the arena.
        work: calls the kernel; several threads call it at once, with the same claims.

    Returns:
        What each thread's call returned, this one's first.
    """
    claims = np.array([0, elements], np.int64)
    return [work(claims)] if elements < LARGE else crew().share(lambda: work(claims))


def accumulate(total: Array, gradient: Array, weight: float) -> None:
    """total := total + weight * gradient, element by element; ValueError if their shapes differ."""
    if total.shape != gradient.shape:
        raise ValueError(f"cannot add {gradient.shape} elements to {total.shape}")
    typed = total.dtype.type(weight)
    share(total.size, lambda claims: _accumulate(total, gradient, typed, claims))


def scale(total: Array, factor: float) -> None:
    """total := factor * total."""
    typed = total.dtype.type(factor)
    share(total.size, lambda claims: _scale(total, typed, claims))


def all_finite(x: npt.NDArray[Any]) -> bool:
    """Whether no element is NaN or infinite; stops at the first block that has one.

    Args:
        x: flat and contiguous; float16, bfloat16, float32, float64, or integers, which always are.
    """
    if np.issubdtype(x.dtype, np.integer):
        return True
    bits, infinity = x.view(f"u{x.dtype.itemsize}"), infinity_of(x.dtype)
    return all(share(x.size, lambda claims: _exponents_below(bits, infinity, claims)))
