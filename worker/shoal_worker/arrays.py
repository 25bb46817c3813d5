"""The array namespace: NumPy on a CPU, CuPy on a GPU. The one module that imports cupy."""

import importlib
import re
import sys
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from shoal import errors
from shoal.program import Array

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


class Device(ABC):
    """Where a program computes.

    Attributes:
        name: "cpu", or "cuda:0 NVIDIA H200".
        xp: the namespace of its arrays.
    """

    name: str
    xp: Namespace

    @abstractmethod
    def activate(self) -> None:
        """Makes it the device of this thread; takes its memory from now on."""

    @abstractmethod
    def to_device(self, array: np.ndarray) -> Array:
        """The same values here; the array itself where it is here already."""

    @abstractmethod
    def to_host(self, array: Array) -> np.ndarray:
        """The same values as a NumPy array; waits for the computation that they come from."""

    def put(self, batch: Any) -> Any:
        """A batch with its NumPy arrays brought here, also those inside tuples, lists and dicts."""
        match batch:
            case np.ndarray():
                return self.to_device(batch)
            case dict():
                return {key: self.put(value) for key, value in batch.items()}
            case list():
                return [self.put(value) for value in batch]
            case tuple() if type(batch) is tuple:
                return tuple(self.put(value) for value in batch)
            case tuple():  # a named one
                return type(batch)(*(self.put(value) for value in batch))
        return batch


class Cpu(Device):
    """The host itself."""

    name = "cpu"
    xp = np

    def activate(self) -> None:
        """There is nothing to choose."""

    def to_device(self, array: np.ndarray) -> Array:
        return array

    def to_host(self, array: Array) -> np.ndarray:
        return np.asarray(array)


class Cuda(Device):
    """One of the GPUs that `CUDA_VISIBLE_DEVICES` shows, through CuPy.

    Args:
        cupy: the module.
        index: of the device among those shown.
    """

    def __init__(self, cupy: Namespace, index: int) -> None:
        self.xp = cupy
        self._index = index
        model = cupy.cuda.runtime.getDeviceProperties(index)["name"]
        self.name = f"cuda:{index} {model.decode() if isinstance(model, bytes) else model}"

    def activate(self) -> None:
        self.xp.cuda.Device(self._index).use()

    def to_device(self, array: np.ndarray) -> Array:
        return self.xp.asarray(array)

    def to_host(self, array: Array) -> np.ndarray:
        return np.asarray(self.xp.asnumpy(array))


def choose_device(wish: str) -> Device:
    """Finds the device that is asked for.

    Args:
        wish: "cpu", "cuda:N", or "auto": the first GPU if there is one, else the CPU.

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
        return Cuda(cupy, index)
    if wish == "auto":
        return Cpu()
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


__all__ = ["Cpu", "Cuda", "Device", "Namespace", "choose_device", "namespace_of", "on_host"]
