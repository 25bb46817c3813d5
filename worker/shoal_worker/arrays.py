"""The array namespace: NumPy on a CPU, CuPy on a GPU. The one module that imports cupy."""

import functools
import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_worker.cuda import Cuda
from shoal_worker.devices import Cpu, Device, lacks_memory

# A module with NumPy's interface; no type describes both.
Namespace = Any


def namespace_of(array: Array) -> Namespace:
    """The module whose functions take this array: cupy for its arrays, numpy for all else."""
    cupy = sys.modules.get("cupy")  # nobody has an array of it without having imported it
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np


def on_host(array: Array) -> np.ndarray:
    """The same values as a NumPy array; waits for the computation that they come from."""
    xp = namespace_of(array)
    return np.asarray(array if xp is np else xp.asnumpy(array))


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has CuPy make one kernel of a function's expressions; on NumPy it is the function itself.

    Args:
        function: of the namespace, and then of arrays and numbers, an array first: element by element, without a look
            at shapes, with what `cupy.fuse` takes (arithmetic, comparisons, `where`, ufuncs).

    Returns:
        The same, without the namespace, which is that of its first array.
    """

    @functools.wraps(function)
    def call(first: Array, *others: Any) -> Any:
        xp = namespace_of(first)
        return function(np, first, *others) if xp is np else kernel_of(xp)(first, *others)

    @functools.cache  # each has a memory of its own, for what it was compiled to
    def kernel_of(cupy: Namespace) -> Callable[..., Any]:
        kernel: Callable[..., Any] = cupy.fuse(kernel_name=function.__name__.strip("_"))(
            functools.wraps(function)(functools.partial(function, cupy))
        )
        return kernel

    return call


def choose_device(wish: str, memory_limit: float = 0.0) -> Device:
    """Finds the device that is asked for.

    Args:
        wish: "cpu", "cuda:N", or "auto": the first GPU if there is one, else the CPU, whose `reason` says why.
        memory_limit: of a GPU, as `Cuda` has it; no matter to the CPU.

    Raises:
        DeviceUnavailable: there is no such device here; the message says which there are.
    """
    if wish == "cpu":
        return Cpu()
    cuda = re.fullmatch(r"cuda:(\d+)", wish)
    if wish != "auto" and not cuda:
        raise errors.DeviceUnavailable(f"device {wish!r} is none of auto, cpu and cuda:N", device=wish)
    index = int(cuda[1]) if cuda else 0
    cupy, count, reason = _find_cupy()
    if index < count:
        return Cuda(cupy, index, memory_limit)
    if wish == "auto":
        return Cpu(reason)
    there = f"there are {count}, cuda:0 to cuda:{count - 1}" if count else reason
    raise errors.DeviceUnavailable(f"device {wish} is not here: {there}; choose another, or cpu, or auto", device=wish)


def _find_cupy() -> tuple[Namespace, int, str]:
    """The module, the number of its devices, and why there is none."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        return None, 0, f"CuPy does not import ({error}); install shoal[gpu] or shoal[gpu13]"
    try:
        return cupy, cupy.cuda.runtime.getDeviceCount(), "CuPy finds no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return cupy, 0, f"CUDA says {error}"


__all__ = ["Cpu", "Cuda", "Device", "Namespace", "choose_device", "fused", "lacks_memory", "namespace_of", "on_host"]
