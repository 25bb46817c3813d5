"""Arithmetic kernels of the server, compiled by Numba: one pass over memory for each update. No policy, no locks.

Arrays are flat, contiguous and aligned. All arrays and scalars of an update have one dtype, float32 or float64. Callers
check the sizes (`update_rules` does). Kernels run without the GIL. The same inputs give the same bits on every call, on
any number of threads. Half-precision gradients are widened to float32 before a kernel gets them.

An update kernel gets an arena's values, the gradient, the slots, the setting ranges (`bounds`, `decay`, `rates`), the
claims (the counter by which threads divide the work) and scalars. It changes values and slots. The elements [bounds[k],
bounds[k + 1]) have weight decay decay[k], and their learning rate is multiplied by rates[k], so one call can update ten
thousand variables. Where rates[k] is 0, nothing changes. Threads with the same claims share an arena: each takes the
next block by an atomic addition. The bits do not depend on which thread takes a block.

Code that is compiled into a kernel must be in the kernel's own file, because Numba only tracks changes there.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from shoal_server.optimizers import compilation, norms, sums  # noqa: F401  # they register kernels, too
from shoal_server.optimizers.compilation import CLAIMS, FLOATS, compiled, kernel, readable, update, warm_up, writable
from shoal_server.optimizers.conversions import infinity_of
from shoal_server.optimizers.kernel_threads import Claims, share

__all__ = ["accumulate", "adagrad", "adam", "all_finite", "ftrl", "momentum", "rmsprop", "scale", "sgd", "warm_up"]

Floats: TypeAlias = npt.NDArray[np.floating[Any]]
Bounds: TypeAlias = npt.NDArray[np.int64]
Settings: TypeAlias = npt.NDArray[np.float64]
Float: TypeAlias = np.floating[Any]

BLOCK = 1 << 17  # elements: 0.1 ms of work, so that no thread waits long for the last block

_INT64, _UNSIGNED = ir.IntType(64), (types.uint16, types.uint32, types.uint64)


def _address_of(_context: Any, array: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, _INT64)

    return types.int64(array), generate


def _load(_context: Any, address: Any, _index: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.load(builder.gep(builder.inttoptr(arguments[0], _INT64.as_pointer()), [arguments[1]]))

    return types.int64(address, types.int64), generate


def _claim(_context: Any, address: Any, _elements: Any) -> tuple[Any, Callable[..., Any]]:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        counter = builder.inttoptr(arguments[0], _INT64.as_pointer())
        # Monotonic order suffices: threads synchronize on the lock of the kernel threads before and after.
        return builder.atomic_rmw("add", counter, arguments[1], "monotonic")

    return types.int64(address, types.int64), generate


# In compiled code: the address of an int64 array, the element at an index, and _take(claims, elements), which claims
# that many elements and returns the first. Generators get addresses. Numba would leak arrays, because it never
# finalizes a generator that a compiled function runs.
_address: Any = intrinsic(_address_of)
_item: Any = intrinsic(_load)
_take: Any = intrinsic(_claim)


@compiled
def _blocks(claims: int) -> Iterator[tuple[int, int]]:
    """Yields the blocks [start, stop) that this thread claims."""
    end = _item(claims, 1)
    start = _take(claims, BLOCK)
    while start < end:
        yield start, min(start + BLOCK, end)
        start = _take(claims, BLOCK)


@compiled
def _runs(bounds: int, rates: int, claims: int) -> Iterator[tuple[int, int, int]]:
    """Yields the claimed blocks in parts (k, start, stop), each within setting range k, but none of the rate 0."""
    # This repeats the loop of `_blocks`: a nested generator compiles a third longer. The ranges cover all elements.
    k = 0  # blocks that a thread claims later lie further on
    end = _item(claims, 1)
    start = _take(claims, BLOCK)
    while start < end:
        block_end = min(start + BLOCK, end)
        while start < block_end:
            while _item(bounds, k + 1) <= start:
                k += 1
            stop = min(_item(bounds, k + 1), block_end)
            if _item(rates, k) != 0:  # the bits of the float64
                yield k, start, stop
            start = stop
        start = _take(claims, BLOCK)


# Numba has no keyword-only arguments, so all are positional. Each loop takes slices first: indices that count from 0
# are never negative. Where LLVM cannot prove that, it tests each index and does not vectorize.


@update(slots=0, scalars=1)
def sgd(
    values: Floats, gradient: Floats, bounds: Bounds, decay: Settings, rates: Settings, claims: Claims, rate: Float
) -> None:
    """Applies `shoal.optim.SGD`.

    Args:
        values, gradient, bounds, decay, rates, claims, rate: see `compilation.update`.
    """
    for k, start, stop in _runs(_address(bounds), _address(rates), _address(claims)):
        cut = slice(start, stop)
        x, g = values[cut], gradient[cut]
        coupled, own = values.dtype.type(decay[k]), rate * values.dtype.type(rates[k])
        for i in range(x.size):
            x[i] -= own * (g[i] + coupled * x[i])


@update(slots=1, scalars=4)
def momentum(
    values: Floats,
    gradient: Floats,
    momentum_buffer: Floats,
    bounds: Bounds,
    decay: Settings,
    rates: Settings,
    claims: Claims,
    rate: Float,
    keep: Float,
    direct: Float,
    through: Float,
) -> None:
    """Applies `shoal.optim.Momentum`: the step is direct * g + through * s.

    Args:
        values, gradient, momentum_buffer, bounds, decay, rates, claims, rate: see `compilation.update`.
        keep: factor of the momentum buffer s.
        direct: 0, or 1 for Nesterov momentum.
        through: 1, or the momentum for Nesterov momentum.
    """
    for k, start, stop in _runs(_address(bounds), _address(rates), _address(claims)):
        cut = slice(start, stop)
        x, g, s = values[cut], gradient[cut], momentum_buffer[cut]
        coupled, own = values.dtype.type(decay[k]), rate * values.dtype.type(rates[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            s[i] = keep * s[i] + slope
            x[i] -= own * (direct * slope + through * s[i])


@update(slots=1, scalars=2)
def adagrad(
    values: Floats,
    gradient: Floats,
    accumulator: Floats,
    bounds: Bounds,
    decay: Settings,
    rates: Settings,
    claims: Claims,
    rate: Float,
    eps: Float,
) -> None:
    """Applies `shoal.optim.Adagrad`.

    Args:
        values, gradient, accumulator, bounds, decay, rates, claims, rate: see `compilation.update`.
        eps: what is added to the denominator.
    """
    for k, start, stop in _runs(_address(bounds), _address(rates), _address(claims)):
        cut = slice(start, stop)
        x, g, s = values[cut], gradient[cut], accumulator[cut]
        coupled, own = values.dtype.type(decay[k]), rate * values.dtype.type(rates[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            s[i] += slope * slope
            x[i] -= own * slope / (np.sqrt(s[i]) + eps)


@update(slots=1, optional_slots=2, scalars=6)
def rmsprop(
    values: Floats,
    gradient: Floats,
    square_avg: Floats,
    grad_avg: Floats | None,
    momentum_buffer: Floats | None,
    bounds: Bounds,
    decay: Settings,
    rates: Settings,
    claims: Claims,
    rate: Float,
    alpha: Float,
    rest: Float,
    inner: Float,
    outer: Float,
    keep: Float,
) -> None:
    """Applies `shoal.optim.RMSProp`.

    Args:
        values, gradient, square_avg, bounds, decay, rates, claims, rate: see `compilation.update`.
        grad_avg: optional slot of the centered form.
        momentum_buffer: optional slot of the momentum.
        keep: momentum.
        alpha: smoothing constant.
        rest: 1 - alpha.
        inner: what is added under the root.
        outer: what is added to the root.
    """
    for k, start, stop in _runs(_address(bounds), _address(rates), _address(claims)):
        cut = slice(start, stop)
        x, g, s = values[cut], gradient[cut], square_avg[cut]
        if grad_avg is not None:
            a = grad_avg[cut]
        if momentum_buffer is not None:
            b = momentum_buffer[cut]
        coupled, own = values.dtype.type(decay[k]), rate * values.dtype.type(rates[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            s[i] = alpha * s[i] + rest * slope * slope
            variance = s[i]
            if grad_avg is not None:
                a[i] = alpha * a[i] + rest * slope
                variance = max(variance - a[i] * a[i], values.dtype.type(0))
            step = slope / (np.sqrt(variance + inner) + outer)
            if momentum_buffer is not None:
                step = b[i] = keep * b[i] + step
            x[i] -= own * step


@update(slots=2, scalars=9)
def adam(
    values: Floats,
    gradient: Floats,
    exp_avg: Floats,
    exp_avg_sq: Floats,
    bounds: Bounds,
    decay: Settings,
    rates: Settings,
    claims: Claims,
    step: Float,
    unbias: Float,
    beta1: Float,
    rest1: Float,
    beta2: Float,
    rest2: Float,
    eps: Float,
    couple: Float,
    shrink: Float,
) -> None:
    """Applies `shoal.optim.Adam` and `AdamW`.

    The caller computes the scalars in float64, where 1 - 0.999 keeps its digits. For the same reason the kernel does
    not compute 1 - lr * decay.

    Args:
        values, gradient, exp_avg, exp_avg_sq, bounds, decay, rates, claims: see `compilation.update`.
        step: lr / (1 - beta1 ** t).
        unbias: 1 / sqrt(1 - beta2 ** t).
        beta1: decay rate of the first average.
        rest1: 1 - beta1.
        beta2: decay rate of the second average.
        rest2: 1 - beta2.
        eps: added to the denominator.
        couple: 1 for coupled weight decay, 0 for decoupled.
        shrink: 0 for coupled weight decay, lr for decoupled.
    """
    for k, start, stop in _runs(_address(bounds), _address(rates), _address(claims)):
        cut = slice(start, stop)
        x, g, m, v = values[cut], gradient[cut], exp_avg[cut], exp_avg_sq[cut]
        coupled, own = couple * values.dtype.type(decay[k]), step * values.dtype.type(rates[k])
        shrunk = shrink * values.dtype.type(decay[k]) * values.dtype.type(rates[k])
        for i in range(x.size):
            slope = g[i] + coupled * x[i]
            m[i] = beta1 * m[i] + rest1 * slope
            v[i] = beta2 * v[i] + rest2 * slope * slope
            x[i] -= shrunk * x[i] + own * m[i] / (unbias * np.sqrt(v[i]) + eps)


@update(slots=2, scalars=5, optional_scalars=1)
def ftrl(
    values: Floats,
    gradient: Floats,
    accumulator: Floats,
    linear: Floats,
    bounds: Bounds,
    decay: Settings,
    rates: Settings,
    claims: Claims,
    rate: Float,
    l1: Float,
    l2: Float,
    l2_shrinkage: Float,
    beta: Float,
    power: Float | None,
) -> None:
    """Applies `shoal.optim.FTRL`.

    Args:
        values, gradient, accumulator, linear, bounds, decay, rates, claims: see `compilation.update`.
        rate, l1, l2, l2_shrinkage, beta: as in `shoal.optim.FTRL`; the learning rate is > 0.
        power: minus the learning-rate power; None means 0.5. Square roots then replace powers: they vectorize, and the
            difference of two of them loses no digits.
    """
    two = values.dtype.type(2)
    for k, start, stop in _runs(_address(bounds), _address(rates), _address(claims)):
        cut = slice(start, stop)
        x, g, n, z = values[cut], gradient[cut], accumulator[cut], linear[cut]
        own = rate * values.dtype.type(rates[k])
        shrunk = own * values.dtype.type(decay[k])
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
            z[i] += g[i] + two * l2_shrinkage * value - rise / own * value
            pull = min(max(z[i], -l1), l1) - z[i]
            x[i] = pull / ((root + beta) / own + two * l2)


# Means are limited to finite numbers, above which rounding may lead.
@kernel([(writable(dtype), readable(dtype), dtype, dtype, CLAIMS) for dtype in FLOATS])
def _accumulate(total: Floats, gradient: Floats, weight: Float, largest: Float, claims: Claims) -> None:
    for start, stop in _blocks(_address(claims)):
        t, g = total[start:stop], gradient[start:stop]
        for i in range(t.size):
            t[i] = min(max(t[i] + weight * g[i], -largest), largest)


@kernel([(writable(dtype), readable(dtype), dtype, dtype, CLAIMS) for dtype in FLOATS])
def _blend(total: Floats, gradient: Floats, weight: Float, largest: Float, claims: Claims) -> None:
    for start, stop in _blocks(_address(claims)):
        t, g = total[start:stop], gradient[start:stop]
        for i in range(t.size):
            t[i] = min(max(weight * t[i] + weight * g[i], -largest), largest)


@kernel([(writable(dtype), dtype, dtype, CLAIMS) for dtype in FLOATS])
def _scale(total: Floats, factor: Float, largest: Float, claims: Claims) -> None:
    for start, stop in _blocks(_address(claims)):
        t = total[start:stop]
        for i in range(t.size):
            t[i] = min(max(t[i] * factor, -largest), largest)


@kernel([(readable(dtype), dtype, CLAIMS) for dtype in _UNSIGNED])
def _exponents_below(bits: npt.NDArray[Any], infinity: Any, claims: Claims) -> bool:
    """Returns whether no claimed element has all bits of `infinity` set; one that has ends the work."""
    # It compares integers, because compiler flags may assume that floats are never NaN.
    for start, stop in _blocks(_address(claims)):
        block = bits[start:stop]
        found = False
        for i in range(block.size):
            found |= (block[i] & infinity) == infinity
        if found:
            _take(_address(claims), bits.size)
            return False
    return True


def accumulate(total: Floats, gradient: Floats, weight: float, *, both: bool = False) -> None:
    """Computes total := total + weight * gradient, element by element, limited to finite numbers.

    Args:
        total: float32 or float64, flat; it is changed.
        gradient: of the type and size of the total, flat.
        weight: factor of the gradient.
        both: whether `weight` is also the total's factor; then it is a power of two up to 0.5, which loses no bits.

    Raises:
        ValueError: the shapes differ.
    """
    if total.shape != gradient.shape:
        raise ValueError(f"cannot add {gradient.shape} elements to {total.shape}")
    as_scalar, largest, chosen = total.dtype.type(weight), np.finfo(total.dtype).max, _blend if both else _accumulate
    share(total.size, lambda claims: chosen(total, gradient, as_scalar, largest, claims))


def scale(total: Floats, factor: float) -> None:
    """Computes total := factor * total, limited to finite numbers."""
    scalars = total.dtype.type(factor), np.finfo(total.dtype).max
    share(total.size, lambda claims: _scale(total, *scalars, claims))


def all_finite(x: npt.NDArray[Any]) -> bool:
    """Returns whether no element of a flat, contiguous array is NaN or infinite. Stops at the first block with one."""
    if np.issubdtype(x.dtype, np.integer):
        return True
    bits, infinity = x.view(f"u{x.dtype.itemsize}"), infinity_of(x.dtype)
    return all(share(x.size, lambda claims: _exponents_below(bits, infinity, claims)))
