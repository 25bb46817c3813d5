"""Device interface of the training loop, and the CPU device. The GPU device is in `shoal_worker.cuda`."""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np

from shoal.program import Array

# Out-of-memory statuses of cuBLAS, cuDNN, cuRAND, the CUDA runtime and the driver.
_NO_ROOM = re.compile(r"_ALLOC(ATION)?_FAILED|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY")

Downloaded = Generator[tuple[str, np.ndarray], None, None]


class Device(ABC):
    """Device on which a program computes.

    Attributes:
        name: "cpu", or for example "cuda:0 NVIDIA H200".
        xp: the namespace of its arrays.
        reason: why "auto" chose it, if it is not a GPU; otherwise empty.
    """

    name: str
    xp: Any
    reason: str = ""

    @abstractmethod
    def activate(self) -> None:
        """Makes it the current device of this thread and applies its memory limit."""

    @abstractmethod
    def to_device(self, array: np.ndarray) -> Array:
        """Returns the array on this device; the array itself if it is there already."""

    @abstractmethod
    def to_host(self, array: Array) -> np.ndarray:
        """Returns the values as a NumPy array. Waits until they are computed."""

    @abstractmethod
    def upload(self, values: dict[str, np.ndarray]) -> dict[str, Array]:
        """Starts to copy a pull's values to the device. Callable on any thread; pass the result to `receive`."""

    @abstractmethod
    def receive(self, values: dict[str, Array]) -> dict[str, Array]:
        """Returns uploaded values for use on this thread, until its next call. Uploads them first if necessary.

        Args:
            values: the result of `upload`, or values on the host.
        """

    @abstractmethod
    def download(self, arrays: Iterable[tuple[str, Array]], wire_dtype: np.dtype | None = None) -> Downloaded:
        """Yields named arrays as NumPy arrays, in order. Later copies start while earlier ones are in progress.

        Args:
            arrays: names and arrays.
            wire_dtype: a 16-bit dtype for float32 arrays; they are cast on the device if that saves copying.
        """

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Returns bytes of GPU memory by kind: "used", "pool" and "limit" (0 means none). Empty on a CPU."""

    def put(self, batch: Any) -> Any:
        """Returns the batch with its NumPy arrays on this device, also those inside tuples, lists and dicts."""
        match batch:
            case np.ndarray():
                return self.to_device(batch)
            case dict():
                return {key: self.put(value) for key, value in batch.items()}
            case list():
                return [self.put(value) for value in batch]
            case tuple() if type(batch) is tuple:
                return tuple(self.put(value) for value in batch)
            case tuple():  # a namedtuple
                return type(batch)(*(self.put(value) for value in batch))
        return batch


class Cpu(Device):
    """The host as a device, without copies.

    Args:
        reason: why no GPU was chosen, if one was searched for.
    """

    name = "cpu"
    xp = np

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def activate(self) -> None:
        """Does nothing."""

    def to_device(self, array: np.ndarray) -> Array:
        return array

    def to_host(self, array: Array) -> np.ndarray:
        return np.asarray(array)

    def upload(self, values: dict[str, np.ndarray]) -> dict[str, Array]:
        return values

    def receive(self, values: dict[str, Array]) -> dict[str, Array]:
        return values

    def download(self, arrays: Iterable[tuple[str, Array]], wire_dtype: np.dtype | None = None) -> Downloaded:  # noqa: ARG002
        for name, array in arrays:
            yield name, np.asarray(array)

    def memory(self) -> dict[str, int]:
        return {}


def lacks_memory(error: BaseException) -> bool:
    """Returns whether the error means that memory ran out, on the host or on a device.

    CuPy's own error is a MemoryError. Errors of CUDA libraries and of pinned memory have no common type, so their text
    is searched.
    """
    return isinstance(error, MemoryError) or _NO_ROOM.search(str(error)) is not None


__all__ = ["Cpu", "Device", "Downloaded", "lacks_memory"]
