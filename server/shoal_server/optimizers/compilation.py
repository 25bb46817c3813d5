"""How a function becomes a kernel: compiled by Numba for the types that are asked, all before a server serves.

Compiled code is kept beside the function's file, or where that is read-only in the user's cache directory; the
environment variable NUMBA_CACHE_DIR overrides both. An image brings the code along (`shoal._numerics.kernels`).
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import binding
from numba import types
from numba.np.numpy_support import as_dtype

from shoal._numerics.kernels import prepare
from shoal_server.optimizers.kernel_threads import crew

F = TypeVar("F", bound=Callable[..., object])

registered: list[tuple[Any, list[tuple[Any, ...]]]] = []  # kernels, each with the types of its arguments


def warm_up() -> float:
    """Compiles every kernel, or loads it from the cache, and returns the seconds that took.

    A server calls it before it serves: without it each kernel compiles at its first call. Afterwards a call with other
    types than the documented ones is a TypeError, where it would have compiled again.

    Raises:
        BadRequest: the environment asks for no sensible number of threads (`kernel_threads.threads`).
    """
    started = time.perf_counter()
    crew()
    for dispatcher, signatures in registered:
        prepare(dispatcher, signatures)
        dispatcher.disable_compile()
        # Numba learns at a first call how arguments convert to a signature's types, and not safely if threads make it
        # at once: each may intern a type of its own for what are the same arguments.
        for arguments in itertools.chain.from_iterable(map(_samples, signatures)):
            dispatcher(*arguments)
    return time.perf_counter() - started


def _samples(signature: tuple[Any, ...]) -> Iterator[list[Any]]:
    """Calls after which there is nothing left to learn: of every type that converts, each array has been one.

    They are zeros, so nothing of an arena is claimed.
    """
    for read_only, unaligned in itertools.product((False, True), repeat=2):
        yield [_sample(each, read_only=read_only, unaligned=unaligned) for each in signature]


def _sample(each: Any, *, read_only: bool, unaligned: bool) -> Any:
    """An argument of this type; an array is read-only or not aligned only if the type's may be."""
    if each is types.none:
        return None
    if not isinstance(each, types.Array):
        return as_dtype(each).type(0)
    dtype = as_dtype(each.dtype)
    start = int(unaligned and not each.aligned)
    array = np.zeros(1 + 2 * dtype.itemsize, np.uint8)[start : start + 2 * dtype.itemsize].view(dtype)
    array.flags.writeable = each.mutable or not read_only
    return array


def processor() -> str:
    """The processor that LLVM compiles kernels for: this host's, or a level of `shoal._numerics.kernels`."""
    return str(numba.config.CPU_NAME or binding.get_host_cpu_name())  # type: ignore[attr-defined,unused-ignore]


def kernel(signatures: Sequence[tuple[Any, ...]]) -> Callable[[F], F]:
    """Compiles a function for these types of arguments at `warm_up`, and keeps the machine code on disk."""

    def register(function: F) -> F:
        dispatcher: Any = compiled(function, cache=True)
        registered.append((dispatcher, list(signatures)))
        return cast(F, dispatcher)

    return register


def compiled(function: F, *, cache: bool = False) -> F:
    """Compiles a kernel; or, without a cache of its own, a function that becomes a part of the kernels that call it.

    Of the fast-math flags only "contract" (a multiplication and an addition become one instruction). The others gain
    nothing here, where memory is the limit, and they may replace a division by an approximation that differs between
    processors, or assume that there is no NaN, which is looked for. Without error_model="numpy" a division may raise,
    and LLVM does not vectorise a loop that may.
    """
    return cast(F, numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy", cache=cache)(function))


def writable(dtype: Any, *, aligned: bool = True) -> Any:
    """The type of an array that is flat, contiguous and written to; if not `aligned`, it may start at any byte."""
    return types.Array(dtype, 1, "C", aligned=aligned)


def readable(dtype: Any, *, aligned: bool = True) -> Any:
    """Likewise of one that is only read: it takes arrays that may be written to as well, by one signature for both."""
    return types.Array(dtype, 1, "C", readonly=True, aligned=aligned)


FLOATS = (types.float32, types.float64)
CLAIMS = writable(types.int64)


def update(*, slots: int, optional_slots: int = 0, scalars: int, optional_scalars: int = 0) -> Callable[[F], F]:
    """Compiles an update kernel.

    Its arguments: values, gradient, slots, optional slots, bounds, decay, claims, scalars, optional scalars.

    An optional one may be None, and each choice is compiled for itself: `if slot is not None` costs nothing.
    """
    shares = (readable(types.int64), readable(types.float64), CLAIMS)
    signatures = []
    for dtype in FLOATS:
        arena = (writable(dtype), readable(dtype), *[writable(dtype)] * slots)
        for some_slots in itertools.product((types.none, writable(dtype)), repeat=optional_slots):
            for some_scalars in itertools.product((types.none, dtype), repeat=optional_scalars):
                signatures.append((*arena, *some_slots, *shares, *[dtype] * scalars, *some_scalars))
    return kernel(signatures)
