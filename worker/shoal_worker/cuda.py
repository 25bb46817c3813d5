"""GPUs through CuPy, which is given and not imported here: streams, pinned memory, and the bounds of the pool.

Programs compute on their thread's current stream. Copies have streams of their own, which do not wait for it by
themselves; so each order that matters is an event:

- A copy to the device goes to memory that computation may have used before, and may still use: the copy waits for
  what was queued when that memory became free. What computes with it waits for the copy.
- A copy to the host waits for what was queued when it was asked for; the host waits for the copy.
- Pinned memory for uploads is used again once the copy from it is done. What was downloaded lies in pinned memory
  that goes back to CuPy's pool with the last reference to it.
"""

import threading
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from shoal.program import Array
from shoal_worker.devices import Device, Fetched

# Uploads go through so many pinned buffers of this size, for each thread that uploads.
_STAGES, _STAGE_BYTES = 4, 8 << 20
# Where in one of them the next array may begin: a cache line, and what any dtype wants.
_ALIGNMENT = 64
# Downloads that may be under way before the oldest is waited for.
_DOWNLOADS = 4


class Cuda(Device):
    """One of the GPUs that `CUDA_VISIBLE_DEVICES` shows, through CuPy.

    Args:
        cupy: the module.
        index: of the device among those shown.
        memory_limit: what CuPy's pool may take: bytes, or a share of the device's if it is at most 1; 0: all there is.
    """

    def __init__(self, cupy: Any, index: int, memory_limit: float = 0.0) -> None:
        self.xp = cupy
        self._index = index
        self._memory_limit = memory_limit
        model = cupy.cuda.runtime.getDeviceProperties(index)["name"]
        self.name = f"cuda:{index} {model.decode() if isinstance(model, bytes) else model}"
        # CuPy 13 has no bfloat16.
        self._casts = {"float16", "bfloat16"} if int(cupy.__version__.partition(".")[0]) >= 14 else {"float16"}
        self._threads = threading.local()  # its streams, on each thread that copies
        self._in_use: _Brought | None = None  # what was received last
        self._retired: deque[tuple[_Brought, Any]] = deque()  # before, each with the end of the computation on it

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
        [(_, values)] = self.fetch([("", array)])
        return values

    def bring(self, values: dict[str, np.ndarray]) -> dict[str, Array]:
        return self._bring(values)

    def _bring(self, values: dict[str, np.ndarray]) -> "_Brought":
        self.xp.cuda.Device(self._index).use()
        uploads = self._uploads
        while self._retired:  # their memory is the next to be taken on this stream
            retired, computed = self._retired.popleft()
            uploads.stream.wait_event(computed)
            del retired
        with uploads.stream:  # of which memory is taken and given back apart from that of computation
            brought = _Brought({name: self.xp.empty(value.shape, value.dtype) for name, value in values.items()})
        for name, value in values.items():
            uploads.copy(value, brought[name])
        brought.arrived = uploads.stream.record()
        return brought

    def receive(self, values: dict[str, Array]) -> dict[str, Array]:
        brought = values if isinstance(values, _Brought) else self._bring(values)
        compute = self.xp.cuda.get_current_stream()
        if self._in_use is not None:
            self._retired.append((self._in_use, compute.record()))
        self._in_use = brought
        compute.wait_event(brought.arrived)
        return dict(brought)

    def fetch(self, arrays: Iterable[tuple[str, Array]], wire: np.dtype | None = None) -> Fetched:
        stream, under_way = self._downloads, deque[_Download]()
        casts = wire is not None and wire.name in self._casts
        try:
            for name, array in arrays:
                if casts and isinstance(array, self.xp.ndarray) and array.dtype == np.float32:
                    array = array.astype(wire)  # noqa: PLW2901 - half as much to copy
                under_way.append(_Download(self.xp, stream, name, array))
                while under_way and (len(under_way) > _DOWNLOADS or under_way[0].done):
                    yield under_way.popleft().wait()
            while under_way:
                yield under_way.popleft().wait()
        finally:
            if under_way:  # nobody may have their memory while the device writes to it
                stream.synchronize()

    def memory(self) -> dict[str, int]:
        pool = self.xp.get_default_memory_pool()
        return {"used": pool.used_bytes(), "pool": pool.total_bytes(), "limit": pool.get_limit()}

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


class _Brought(dict[str, Array]):
    """A pull's values on the device, or on their way. The device keeps them until all computation with them is over."""

    arrived: Any  # the event after the last copy


class _Uploads:
    """A stream of copies to the device, through pinned buffers in turn. For one thread.

    The host fills a buffer while the device reads from others. Arrays share buffers, or take several.
    """

    def __init__(self, cupy: Any) -> None:
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self._xp = cupy
        self._stages: deque[tuple[np.ndarray, Any]] = deque()  # those that are full, each with the end of its copies
        self._stage = _pinned(cupy, (_STAGE_BYTES,), np.dtype(np.uint8))
        self._filled = 0  # bytes of it

    def copy(self, source: np.ndarray, target: Array) -> None:
        """Queues a copy to memory that is free to be written to on this stream. The source may change at once."""
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
        """Room for as many bytes, or for fewer."""
        if self._filled >= _STAGE_BYTES:
            self._stages.append((self._stage, self.stream.record()))
            if len(self._stages) < _STAGES:
                self._stage = _pinned(self._xp, (_STAGE_BYTES,), np.dtype(np.uint8))
            else:
                self._stage, copied = self._stages.popleft()
                copied.synchronize()
            self._filled = 0
        place = self._stage[self._filled : self._filled + wish]
        self._filled += -(-place.size // _ALIGNMENT) * _ALIGNMENT
        return place


class _Download:
    """An array's copy to the host, which begins at once. It keeps the array until it is over."""

    def __init__(self, cupy: Any, stream: Any, name: str, array: Array) -> None:
        self._name = name
        self._copied = None
        if not isinstance(array, cupy.ndarray):  # the host's, or another library's
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
        """Its name and values."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._name, self._values


def _pinned(cupy: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """An array in memory that the device reads and writes by itself; it goes back to CuPy's pool with the array."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    if not nbytes:
        return np.empty(shape, dtype)
    return np.ndarray(shape, dtype, buffer=cupy.cuda.alloc_pinned_memory(nbytes))


__all__ = ["Cuda"]
