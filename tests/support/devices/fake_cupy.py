"""Fake of CuPy for hosts without a GPU: NumPy's functions, and streams that copy as late as possible.

The null stream computes at once. A copy on another stream happens only when something waits for it, which is the latest
time at which a real device may copy. So a buffer that is reused too early, or a missing event, gives wrong values.
"""

import types
from collections.abc import Callable
from typing import Any

import numpy as np

from support.devices.fake_kernels import FakeModule

GARBAGE = 0xAA  # what fresh memory holds


class FakeArray(np.ndarray):
    """An array on a fake device."""

    @property
    def data(self) -> Any:
        return types.SimpleNamespace(ptr=self.ctypes.data)

    @property
    def device(self) -> Any:
        return types.SimpleNamespace(id=0)

    def set(self, source: np.ndarray, stream: "FakeStream") -> None:
        assert source.flags.c_contiguous
        assert source.dtype == self.dtype
        stream.queue(lambda: np.copyto(self, source))

    def get(self, stream: "FakeStream", out: np.ndarray, blocking: bool) -> None:
        assert self.flags.c_contiguous, "CuPy would make a copy, and drop it while the device reads from it"
        assert out.dtype == self.dtype
        assert not blocking
        stream.queue(lambda: np.copyto(out, self.view(np.ndarray)))


class FakeEvent:
    def __init__(self, stream: "FakeStream", position: int) -> None:
        self.stream, self._position = stream, position

    @property
    def done(self) -> bool:
        return self.stream.ran >= self._position

    def synchronize(self) -> None:
        self.stream.run_to(self._position)


class FakeStream:
    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        assert null or non_blocking, "others wait for the null stream, and it for them"
        self.null = null
        self.ptr = 0 if null else id(self)
        self.ran = 0
        self.waits: list[FakeEvent] = []
        self._queued: list[Callable[[], None]] = []

    def queue(self, work: Callable[[], None]) -> None:
        self._queued.append(work)
        if self.null:
            self.synchronize()

    def record(self) -> FakeEvent:
        return FakeEvent(self, len(self._queued))

    def wait_event(self, event: FakeEvent) -> None:
        self.waits.append(event)
        self.queue(event.synchronize)

    @property
    def idle(self) -> bool:
        """Whether all queued work has run."""
        return self.ran == len(self._queued)

    def synchronize(self) -> None:
        self.run_to(len(self._queued))

    def run_to(self, position: int) -> None:
        while self.ran < position:
            self.ran += 1
            self._queued[self.ran - 1]()

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(self, *_: object) -> Any:
        return None


class FakePhilox(np.random.Philox):
    """A fake of CuPy's Philox, which also takes only a seed."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)


class FakeGenerator:
    def __init__(self, bits: FakePhilox) -> None:
        assert isinstance(bits, FakePhilox), "another takes long to begin"
        self._host = np.random.Generator(bits)

    def random(self, size: int, dtype: Any) -> FakeArray:
        return self._host.random(size, dtype).view(FakeArray)


class FakePool:
    def __init__(self) -> None:
        self.limits: list[dict[str, int]] = []

    def set_limit(self, **limit: int) -> None:
        self.limits.append(limit)

    def used_bytes(self) -> int:
        return 100

    def total_bytes(self) -> int:
        return 200

    def get_limit(self) -> int:
        return 300


class FakeRuntimeError(RuntimeError):
    pass


class FakeOutOfMemoryError(MemoryError):
    """A fake of CuPy's error, which is also a MemoryError."""


def fake_cupy(devices: int | Exception = 1) -> types.ModuleType:
    """Returns the part of CuPy that Shoal needs, with this number of devices, or with an error in their place.

    It keeps `used` (devices), `pinned` (bytes of each allocation) and `kernels` (names of fused functions), and refuses
    arrays larger than `room` bytes.
    """
    cupy: Any = types.ModuleType("cupy")
    cupy.__version__ = "14.2.0"
    pool, null = FakePool(), FakeStream(null=True)

    def count() -> int:
        if isinstance(devices, Exception):
            raise devices
        return devices

    class FakeDevice:
        def __init__(self, index: int) -> None:
            self.index = index

        def use(self) -> None:
            cupy.used.append(self.index)

    def empty(shape: Any, dtype: Any = np.float64) -> Any:
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if nbytes > cupy.room:
            raise FakeOutOfMemoryError(f"Out of memory allocating {nbytes:,} bytes (allocated so far: 0 bytes).")
        return np.full(nbytes, GARBAGE, np.uint8).view(dtype).reshape(shape).view(FakeArray)

    def alloc_pinned_memory(nbytes: int) -> bytearray:
        cupy.pinned.append(nbytes)
        return bytearray([GARBAGE]) * nbytes

    def fuse(kernel_name: str) -> Callable[[Any], Any]:
        cupy.kernels.append(kernel_name)
        return lambda function: function

    runtime = types.SimpleNamespace(
        getDeviceCount=count,
        getDeviceProperties=lambda index: {"name": f"Fake {index}".encode()},
        CUDARuntimeError=FakeRuntimeError,
    )
    cupy.__dict__.update(
        ndarray=FakeArray,
        used=[],
        pinned=[],
        kernels=[],
        room=1 << 40,
        pool=pool,
        empty=empty,
        fuse=fuse,
        ascontiguousarray=lambda array, dtype=None: np.ascontiguousarray(array, dtype).view(FakeArray),
        RawModule=FakeModule,
        asnumpy=lambda array: np.asarray(array).view(np.ndarray),
        get_default_memory_pool=lambda: pool,
        random=types.SimpleNamespace(Generator=FakeGenerator, Philox4x3210=FakePhilox),
        cuda=types.SimpleNamespace(
            runtime=runtime,
            Device=FakeDevice,
            Stream=FakeStream,
            get_current_stream=lambda: null,
            alloc_pinned_memory=alloc_pinned_memory,
        ),
    )
    cupy.__getattr__ = lambda name: getattr(np, name)
    made: types.ModuleType = cupy
    return made
