"""Where programs compute: what a device does for the loop, and the host as one. GPUs: `shoal_worker.cuda`."""

import re
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from typing import Any

import numpy as np

from shoal.program import Array

# How CUDA and its libraries say it, by names of their statuses: cuBLAS, cuDNN, cuRAND, the runtime, the driver.
_NO_ROOM = re.compile(r"_ALLOC(ATION)?_FAILED|cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY")

Fetched = Generator[tuple[str, np.ndarray], None, None]


class Device(ABC):
    """Where a program computes.

    Attributes:
        name: "cpu", or "cuda:0 NVIDIA H200".
        xp: the namespace of its arrays.
        reason: why it was chosen, where that may surprise; else empty.
    """

    name: str
    xp: Any
    reason: str = ""

    @abstractmethod
    def activate(self) -> None:
        """Makes it the device of this thread; takes its memory from now on."""

    @abstractmethod
    def to_device(self, array: np.ndarray) -> Array:
        """The same values here; the array itself where it is here already."""

    @abstractmethod
    def to_host(self, array: Array) -> np.ndarray:
        """The same values as a NumPy array; waits for the computation that they come from."""

    @abstractmethod
    def bring(self, values: dict[str, np.ndarray]) -> dict[str, Array]:
        """Begins to bring a pull's values here, on any thread, while another computes. `receive` gives them."""

    @abstractmethod
    def receive(self, values: dict[str, Array]) -> dict[str, Array]:
        """What `bring` returned, for this thread to compute with, until it receives the next.

        Values that nobody brought are brought now.
        """

    @abstractmethod
    def fetch(self, arrays: Iterable[tuple[str, Array]], wire: np.dtype | None = None) -> Fetched:
        """Named arrays on the host, in their order. Where copying takes time, later ones are asked for meanwhile.

        Args:
            arrays: by name.
            wire: a half that arrays of float32 travel on in: where that saves copying, they come in it.
        """

    @abstractmethod
    def memory(self) -> dict[str, int]:
        """Bytes of its own memory: "used", "pool" (taken from the device) and "limit" (0: none); empty on the host."""

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
    """The host itself: nothing is copied.

    Args:
        reason: why it is not a GPU, where one was looked for.
    """

    name = "cpu"
    xp = np

    def __init__(self, reason: str = "") -> None:
        self.reason = reason

    def activate(self) -> None:
        """There is nothing to choose."""

    def to_device(self, array: np.ndarray) -> Array:
        return array

    def to_host(self, array: Array) -> np.ndarray:
        return np.asarray(array)

    def bring(self, values: dict[str, np.ndarray]) -> dict[str, Array]:
        return values

    def receive(self, values: dict[str, Array]) -> dict[str, Array]:
        return values

    def fetch(self, arrays: Iterable[tuple[str, Array]], wire: np.dtype | None = None) -> Fetched:  # noqa: ARG002
        for name, array in arrays:
            yield name, np.asarray(array)

    def memory(self) -> dict[str, int]:
        return {}


def lacks_memory(error: BaseException) -> bool:
    """Whether the host, a device's pool, or a library beside the pool found no room for something.

    CuPy's own error is a MemoryError. That of a library's handle or of pinned memory is each library's own, and no type
    tells it from the others.
    """
    return isinstance(error, MemoryError) or _NO_ROOM.search(str(error)) is not None


__all__ = ["Cpu", "Device", "Fetched", "lacks_memory"]
