"""Array namespaces: NumPy on a CPU, CuPy on a GPU. No other module imports cupy."""

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
    """Returns the module whose functions take this array: cupy for its own arrays, numpy for all others."""
    cupy = sys.modules.get("cupy")  # a CuPy array cannot exist before cupy is imported
    return cupy if cupy is not None and isinstance(array, cupy.ndarray) else np


def on_host(array: Array) -> np.ndarray:
    """Returns the values as a NumPy array. Waits until they are computed."""
    xp = namespace_of(array)
    return np.asarray(array if xp is np else xp.asnumpy(array))


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compiles a function into one kernel on CuPy. On NumPy, the function is called as it is.

    Args:
        function: takes the namespace, then arrays and numbers, an array first. It works element by element, does not
            look at shapes, and uses only what `cupy.fuse` supports: arithmetic, comparisons, `where` and ufuncs.

    Returns:
        The function without its first parameter: the namespace is that of the first array.
    """

    @functools.wraps(function)
    def call(first: Array, *others: Any) -> Any:
        xp = namespace_of(first)
        return function(np, first, *others) if xp is np else kernel_of(xp)(first, *others)

    @functools.cache  # one cache for each function
    def kernel_of(cupy: Namespace) -> Callable[..., Any]:
        kernel: Callable[..., Any] = cupy.fuse(kernel_name=function.__name__.strip("_"))(
            functools.wraps(function)(functools.partial(function, cupy))
        )
        return kernel

    return call


def choose_device(wish: str, memory_limit: float = 0.0) -> Device:
    """Returns the requested device.

    Args:
        wish: "cpu", "cuda:N" or "auto". "auto" takes the first GPU; without one it takes the CPU, and the device's
            `reason` says why.
        memory_limit: of a GPU, as in `Cuda`. A CPU ignores it.

    Raises:
        DeviceUnavailable: this machine has no such device; the message lists the devices that it has.
    """
    if wish == "cpu":
        return Cpu()
    cuda = re.fullmatch(r"cuda:(\d+)", wish)
    if wish != "auto" and not cuda:
        raise errors.DeviceUnavailable(f"device {wish!r} is unknown; choose auto, cpu or cuda:N", device=wish)
    index = int(cuda[1]) if cuda else 0
    cupy, count, reason = _find_cupy()
    if index < count:
        return Cuda(cupy, index, memory_limit)
    if wish == "auto":
        return Cpu(reason)
    found = f"this machine has {count}, cuda:0 to cuda:{count - 1}" if count else reason
    raise errors.DeviceUnavailable(
        f"device {wish} does not exist: {found}; choose another device, cpu or auto", device=wish
    )


def _find_cupy() -> tuple[Namespace, int, str]:
    """Returns the module, its number of devices, and, if there are no devices, the reason."""
    try:
        cupy = importlib.import_module("cupy")
    except ImportError as error:
        return None, 0, f"CuPy cannot be imported ({error}); install shoal[gpu] or shoal[gpu13]"
    try:
        return cupy, cupy.cuda.runtime.getDeviceCount(), "CuPy finds no GPU"
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return cupy, 0, f"CUDA reports {error}"


__all__ = ["Cpu", "Cuda", "Device", "Namespace", "choose_device", "fused", "lacks_memory", "namespace_of", "on_host"]
