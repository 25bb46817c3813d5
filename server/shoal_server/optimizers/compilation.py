"""Compilation of kernels with Numba, for the requested types, before the server serves.

Compiled code is cached beside the function's file. If that folder is read-only, the code is cached in the user's cache
directory. All environments of a user share the code through ~/.cache/shoal (`shoal._numerics.shared_kernels`). The
environment variable NUMBA_CACHE_DIR overrides all of this. Container images include the cache
(`shoal._numerics.kernels`).
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numba
import numpy as np
import structlog
from llvmlite import binding
from numba import types
from numba.np.numpy_support import as_dtype

from shoal._numerics.kernels import prepare
from shoal._numerics.shared_kernels import shared_folder
from shoal._system import hidden
from shoal_server.optimizers.kernel_threads import kernel_threads

F = TypeVar("F", bound=Callable[..., object])

_log = structlog.get_logger(__name__)

registered: list[tuple[Any, list[tuple[Any, ...]]]] = []  # kernels, each with its signatures


def warm_up() -> float:
    """Compiles every kernel, or loads it from the cache, starts the kernel threads, and returns the seconds of both.

    A server calls it before it serves; otherwise each kernel compiles at its first call.

    Raises:
        BadRequest: SHOAL_KERNEL_THREADS is invalid (`kernel_threads.thread_count`).
    """
    started = time.perf_counter()
    kernel_threads()
    load_kernels()
    return time.perf_counter() - started


def load_kernels() -> None:
    """Compiles every kernel, or loads it from the cache. It starts no threads, so that the process can still fork.

    After it, a call with other types than a kernel's signatures raises TypeError instead of compiling again.
    """
    compile_kernels()
    for dispatcher, signatures in registered:
        dispatcher.disable_compile()
        # Numba learns at the first call how arguments convert to a signature's types. This is not thread-safe: each
        # thread may intern its own type for the same arguments.
        for arguments in itertools.chain.from_iterable(map(samples, signatures)):
            dispatcher(*arguments)


def compile_kernels() -> None:
    """Compiles every kernel, or loads it from the cache, and runs none: this processor may lack their instructions."""
    progress = _CompileProgress(len(registered))
    with hidden("scipy.linalg"):  # Numba imports it where it is installed; no kernel uses it
        for number, (dispatcher, signatures) in enumerate(registered, 1):
            progress.now = number
            shared = shared_folder(dispatcher)
            prepare(dispatcher, signatures, shared=shared, on_compile=progress.tell, on_wait=progress.tell_wait)


class _CompileProgress:
    """Says which kernels are compiled. The first line is a warning, which `shoal up` shows: a start then takes longer.

    Attributes:
        now: the number of the kernel, from 1.
    """

    def __init__(self, total: int) -> None:
        self._total, self._warned, self.now = total, False, 0
        self._warned_of_wait = False

    def tell(self) -> None:
        """Writes a line to the log."""
        if self._warned:
            _log.info("compiling kernels", kernel=self.now, of=self._total)
        else:
            _log.warning(
                "compiling kernels, which takes about ten seconds of one core at the first start of this version",
                kernel=self.now,
                of=self._total,
            )
        self._warned = True

    def tell_wait(self) -> None:
        """Writes to the log, once, that another process compiles the kernels."""
        if not self._warned_of_wait:
            _log.info("waiting for another process, which compiles the kernels", kernel=self.now, of=self._total)
        self._warned_of_wait = True


def samples(signature: tuple[Any, ...]) -> Iterator[list[Any]]:
    """Yields arguments for calls of a kernel, so that Numba learns how each type of array converts to the signature.

    All arguments are zeros, so the kernel processes no elements.
    """
    for read_only, unaligned in itertools.product((False, True), repeat=2):
        yield [_sample(each, read_only=read_only, unaligned=unaligned) for each in signature]


def _sample(each: Any, *, read_only: bool, unaligned: bool) -> Any:
    """Returns an argument of this type. An array is read-only or unaligned only if its type permits that."""
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
    """Returns the processor that LLVM compiles for: this host's, or a level of `shoal._numerics.kernels`."""
    return str(numba.config.CPU_NAME or binding.get_host_cpu_name())  # type: ignore[attr-defined,unused-ignore]


def kernel(signatures: Sequence[tuple[Any, ...]]) -> Callable[[F], F]:
    """Registers a function as a kernel: `warm_up` compiles it for these argument types and caches the machine code."""

    def register(function: F) -> F:
        dispatcher: Any = compiled(function, cache=True)
        registered.append((dispatcher, list(signatures)))
        return cast(F, dispatcher)

    return register


def compiled(function: F, *, cache: bool = False) -> F:
    """Compiles a kernel with a cache, or, without one, a function that is compiled into the kernels that call it.

    Of the fast-math flags, only "contract" is set: a multiplication and an addition become one instruction. The others
    gain nothing here, because memory is the bottleneck. They may also replace a division by an approximation that
    differs between processors, or assume that there is no NaN, which kernels look for. With error_model="numpy" a
    division does not raise; LLVM does not vectorize loops that may raise.

    Args:
        function: the function.
        cache: whether to keep the machine code on disk.
    """
    return cast(F, numba.njit(nogil=True, fastmath={"contract"}, error_model="numpy", cache=cache)(function))


def writable(dtype: Any, *, aligned: bool = True) -> Any:
    """Returns the type of a flat, contiguous, writable array. If not `aligned`, it may start at any byte."""
    return types.Array(dtype, 1, "C", aligned=aligned)


def readable(dtype: Any, *, aligned: bool = True) -> Any:
    """Returns the type of a flat, contiguous array that is only read. Writable arrays match it, too."""
    return types.Array(dtype, 1, "C", readonly=True, aligned=aligned)


FLOATS = (types.float32, types.float64)
CLAIMS = writable(types.int64)


def update(*, slots: int, optional_slots: int = 0, scalars: int, optional_scalars: int = 0) -> Callable[[F], F]:
    """Returns a decorator that registers an update kernel.

    A kernel's arguments are: values, gradient, slots, optional slots, bounds, decay, rates, claims, scalars, optional
    scalars. A scalar `rate` is the learning rate. An optional argument may be None. Each combination is compiled
    separately, so `if slot is not None` costs nothing.

    Args:
        slots: number of slots.
        optional_slots: number of slots that may be None.
        scalars: number of scalars.
        optional_scalars: number of scalars that may be None.
    """
    shares = (readable(types.int64), readable(types.float64), readable(types.float64), CLAIMS)
    signatures = []
    for dtype in FLOATS:
        arena = (writable(dtype), readable(dtype), *[writable(dtype)] * slots)
        for some_slots in itertools.product((types.none, writable(dtype)), repeat=optional_slots):
            for some_scalars in itertools.product((types.none, dtype), repeat=optional_scalars):
                signatures.append((*arena, *some_slots, *shares, *[dtype] * scalars, *some_scalars))
    return kernel(signatures)
