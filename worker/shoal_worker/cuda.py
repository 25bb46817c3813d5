"""GPU device over CuPy: streams, pinned memory and the limit of the memory pool.

The CuPy module is passed in and not imported here. Programs compute on their thread's current stream. Copies use
streams of their own, which are by default not ordered with the current stream. CUDA events therefore enforce these
orders:

- A copy to the device writes to memory that earlier computation may still use. The copy waits for the work that was
  queued when that memory was freed. Computation on the copied values waits for the copy.
- A copy to the host waits for the work that was queued when the copy was requested. The host waits for the copy.
- A pinned buffer for uploads is reused after the copy from it is done. Downloaded values lie in pinned memory. When no
  reference to that memory is left, it returns to CuPy's pool.
"""

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from shoal.program import Array
from shoal_worker.devices import Device, Downloaded

# Number and size of the pinned buffers of each thread that uploads.
STAGES, STAGE_BYTES = 4, 8 << 20
# Alignment of arrays in these buffers: a cache line, which suits every dtype.
_ALIGNMENT = 64
# Downloads in progress before the oldest one is waited for.
_DOWNLOADS = 4


class Cuda(Device):
    """One of the GPUs that `CUDA_VISIBLE_DEVICES` shows, through CuPy.

    Args:
        cupy: the CuPy module.
        index: index among the visible devices.
        memory_limit: limit of CuPy's pool: bytes, or a share of the device's memory if at most 1; 0 means no limit.
    """

    def __init__(self, cupy: Any, index: int, memory_limit: float = 0.0) -> None:
        self.xp = cupy
        self._index = index
        self._memory_limit = memory_limit
        model = cupy.cuda.runtime.getDeviceProperties(index)["name"]
        self.name = f"cuda:{index} {model.decode() if isinstance(model, bytes) else model}"
        # CuPy 13 has no bfloat16.
        self._casts = {"float16", "bfloat16"} if int(cupy.__version__.partition(".")[0]) >= 14 else {"float16"}
        self._threads = threading.local()  # the streams of each copying thread
        self._in_use: _DeviceValues | None = None  # the values received last
        self._retired: deque[tuple[_DeviceValues, Any]] = (
            deque()
        )  # earlier values, each with the event that ends their use

    def activate(self) -> None:
        self.xp.cuda.Device(self._index).use()
        pool, limit = self.xp.get_default_memory_pool(), self._memory_limit
        if limit > 1:
            pool.set_limit(size=int(limit))
        elif limit > 0:
            pool.set_limit(fraction=limit)

    def to_device(self, array: np.ndarray) -> Array:
        if isinstance(array, self.xp.ndarray):
            return array
        compute, uploads = self.xp.cuda.get_current_stream(), self._uploads
        there = self.xp.empty(array.shape, array.dtype)
        uploads.stream.wait_event(compute.record())
        uploads.copy(array, there)
        compute.wait_event(uploads.stream.record())
        return there

    def to_host(self, array: Array) -> np.ndarray:
        [(_, values)] = self.download([("", array)])
        return values

    def upload(self, values: dict[str, np.ndarray]) -> dict[str, Array]:
        return self._upload(values)

    def _upload(self, values: dict[str, np.ndarray]) -> "_DeviceValues":
        self.xp.cuda.Device(self._index).use()
        uploads = self._uploads
        while self._retired:  # the next allocation on this stream may reuse their memory
            retired, computed = self._retired.popleft()
            uploads.stream.wait_event(computed)
            del retired
        with uploads.stream:  # allocates from this stream's part of the pool
            uploaded = _DeviceValues({name: self.xp.empty(value.shape, value.dtype) for name, value in values.items()})
        for name, value in values.items():
            uploads.copy(value, uploaded[name])
        uploaded.arrived = uploads.stream.record()
        return uploaded

    def receive(self, values: dict[str, Array]) -> dict[str, Array]:
        uploaded = values if isinstance(values, _DeviceValues) else self._upload(values)
        compute = self.xp.cuda.get_current_stream()
        if self._in_use is not None:
            self._retired.append((self._in_use, compute.record()))
        self._in_use = uploaded
        compute.wait_event(uploaded.arrived)
        return dict(uploaded)

    def download(self, arrays: Iterable[tuple[str, Array]], wire_dtype: np.dtype | None = None) -> Downloaded:
        stream, under_way = self._downloads, deque[_Download]()
        casts = wire_dtype is not None and wire_dtype.name in self._casts
        try:
            for name, array in arrays:
                if casts and isinstance(array, self.xp.ndarray) and array.dtype == np.float32:
                    array = array.astype(wire_dtype)  # noqa: PLW2901 - halves the bytes to copy
                under_way.append(_Download(self.xp, stream, name, array))
                while under_way and (len(under_way) > _DOWNLOADS or under_way[0].done):
                    yield under_way.popleft().wait()
            while under_way:
                yield under_way.popleft().wait()
        finally:
            if under_way:  # keep the buffers until the device has written them
                stream.synchronize()

    def memory(self) -> dict[str, int]:
        pool = self.xp.get_default_memory_pool()
        return {"used": pool.used_bytes(), "pool": pool.total_bytes(), "limit": pool.get_limit()}

    @property
    def upload_stream(self) -> Any:
        """The stream of this thread's copies to the device."""
        return self._uploads.stream

    @property
    def download_stream(self) -> Any:
        """The stream of this thread's copies to the host."""
        return self._downloads

    @property
    def retired(self) -> Sequence[tuple[dict[str, Array], Any]]:
        """The values that are no longer in use by the caller, oldest first, each with the event that ends their use."""
        return [*self._retired]

    @property
    def _uploads(self) -> "_Uploads":
        if not hasattr(self._threads, "uploads"):
            self._threads.uploads = _Uploads(self.xp)
        uploads: _Uploads = self._threads.uploads
        return uploads

    @property
    def _downloads(self) -> Any:
        if not hasattr(self._threads, "downloads"):
            self._threads.downloads = self.xp.cuda.Stream(non_blocking=True)
        return self._threads.downloads


class _DeviceValues(dict[str, Array]):
    """Values of a pull on the device, perhaps still being copied. The device keeps them until their use has ended."""

    arrived: Any  # event after the last copy


class _Uploads:
    """Stream of copies to the device through a ring of pinned buffers, for one thread.

    The host fills one buffer while the device reads from others. Small arrays share a buffer; large ones take several.
    """

    def __init__(self, cupy: Any) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._xp = cupy
        self._stages: deque[tuple[np.ndarray, Any]] = deque()  # full buffers, each with the event after its copies
        self._stage = _pinned(cupy, (STAGE_BYTES,), np.dtype(np.uint8))
        self._filled = 0  # bytes used in the current buffer

    def copy(self, source: np.ndarray, target: Array) -> None:
        """Queues a copy to memory that this stream may write. The source may change after the call."""
        source = np.ascontiguousarray(source).reshape(-1).view(np.uint8)
        target = target.reshape(-1).view(self._xp.uint8)
        start = 0
        while start < source.size:
            place = self._place(source.size - start)
            stop = start + place.size
            np.copyto(place, source[start:stop])
            target[start:stop].set(place, stream=self.stream)
            start = stop

    def _place(self, wish: int) -> np.ndarray:
        """Returns space for up to so many bytes, at least one."""
        if self._filled >= STAGE_BYTES:
            self._stages.append((self._stage, self.stream.record()))
            if len(self._stages) < STAGES:
                self._stage = _pinned(self._xp, (STAGE_BYTES,), np.dtype(np.uint8))
            else:
                self._stage, copied = self._stages.popleft()
                copied.synchronize()
            self._filled = 0
        place = self._stage[self._filled : self._filled + wish]
        self._filled += -(-place.size // _ALIGNMENT) * _ALIGNMENT
        return place


class _Download:
    """Copy of an array to the host. It starts at once, and keeps a reference to the array until it is done."""

    def __init__(self, cupy: Any, stream: Any, name: str, array: Array) -> None:
        self._name = name
        self._copied = None
        if not isinstance(array, cupy.ndarray):  # on the host, or of another library
            self._values = np.asarray(cupy.asnumpy(array))
            return
        self._array = array if array.flags.c_contiguous else cupy.ascontiguousarray(array)
        self._values = _pinned(cupy, array.shape, array.dtype)
        stream.wait_event(cupy.cuda.get_current_stream().record())
        self._array.get(stream=stream, out=self._values, blocking=False)
        self._copied = stream.record()

    @property
    def done(self) -> bool:
        return self._copied is None or bool(self._copied.done)

    def wait(self) -> tuple[str, np.ndarray]:
        """Waits for the copy and returns the name and the values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._name, self._values


def _pinned(cupy: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Returns an array in pinned memory, which returns to CuPy's pool with the array."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, buffer=cupy.cuda.alloc_pinned_memory(nbytes))


__all__ = ["STAGES", "STAGE_BYTES", "Cuda"]
