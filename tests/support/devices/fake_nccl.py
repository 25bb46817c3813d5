"""Fake of CuPy with NCCL, whose GPUs are memory of this process and whose ranks are threads of it.

As in NCCL, a sum is there when all ranks have started it; the n-th call of one rank is joined with the n-th of the
others, whatever arrays they have; and a rank waits for one that has ended until it aborts.
"""

import ctypes
import itertools
import threading
import types
from collections import defaultdict
from typing import Any

import numpy as np

DTYPES: dict[int, Any] = {0: np.float32, 1: np.float64, 2: np.int64}


class Pointer:
    def __init__(self, address: int) -> None:
        self.ptr = address


class GpuArray(np.ndarray):
    """An array with the address of its memory, as CuPy's have it."""

    @property
    def data(self) -> Any:
        return Pointer(self.ctypes.data)


class NcclError(RuntimeError):
    pass


class World:
    """The communicators of all ranks that were made with one id."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.calls: dict[int, dict[int, tuple[int, int, int, int]]] = defaultdict(dict)  # by number, then by rank
        self.done: set[int] = set()
        self.ranks = 0

    def call(self, rank: int, number: int, what: tuple[int, int, int, int]) -> None:
        with self.lock:
            self.calls[number][rank] = what
            if len(self.calls[number]) == self.ranks:
                given = [self.calls[number][it] for it in range(self.ranks)]
                if len({(count, kind) for *_, count, kind in given}) > 1:
                    return  # undefined in NCCL: here, it never ends
                total = sum(_memory(source, count, kind) for source, _, count, kind in given)
                for _, out, count, kind in given:
                    _memory(out, count, kind)[:] = total
                self.done.add(number)


def _memory(address: int, count: int, kind: int) -> Any:
    nbytes = count * np.dtype(DTYPES[kind]).itemsize
    return np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), DTYPES[kind])


def fake_cupy(*, buses: list[str], version: int = 22000, signed_ids: bool = False) -> types.ModuleType:
    """Returns a module with NumPy's functions, GPUs on these buses, and `communicators`, those that were made.

    Args:
        buses: the PCI bus id of each GPU.
        version: the version of NCCL.
        signed_ids: whether ids are tuples of signed numbers, as in CuPy 13.
    """
    cupy = types.ModuleType("cupy")
    worlds: dict[bytes, World] = defaultdict(World)
    streams: dict[int, Any] = {}
    numbers = itertools.count(1)
    cupy.__getattr__ = lambda name: getattr(np, name)  # type: ignore[method-assign]
    cupy.communicators = []  # type: ignore[attr-defined]

    class Communicator:
        def __init__(self, ranks: int, identity: Any, rank: int) -> None:
            if isinstance(identity, tuple) is not signed_ids:
                raise TypeError("an id of another kind")
            self.world = worlds[bytes(it & 0xFF for it in identity)]
            self.world.ranks, self.rank, self.calls, self.aborted, self.destroyed = ranks, rank, 0, False, False
            self.failure: NcclError | None = None
            cupy.communicators.append(self)

        def allReduce(self, source: int, out: int, count: int, kind: int, op: int, stream: int) -> None:
            assert op == cupy.cuda.nccl.NCCL_SUM
            streams[stream].queued.append((self.world, self.calls))
            self.world.call(self.rank, self.calls, (source, out, count, kind))
            self.calls += 1

        def check_async_error(self) -> None:
            if self.failure:
                raise self.failure

        def abort(self) -> None:
            self.aborted = True

        def destroy(self) -> None:
            self.destroyed = True

    class Stream:
        def __init__(self, *, non_blocking: bool = False) -> None:
            self.queued: list[tuple[World, int]] = []
            self.ptr = next(numbers) if non_blocking else 0
            streams[self.ptr] = self

        def wait_event(self, event: Any) -> None:
            assert event.of == 0

        def synchronize(self) -> None:
            pass

    class Event:
        def __init__(self, *, disable_timing: bool) -> None:
            assert disable_timing

        def record(self, stream: Stream) -> None:
            self.of, self.waits_for = stream.ptr, [*stream.queued]

        @property
        def done(self) -> bool:
            return all(number in world.done for world, number in self.waits_for)

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def use(self) -> None:
            pass

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

    def unique_id() -> Any:
        identity = next(numbers).to_bytes(2, "big") + bytes(range(130, 256))
        return tuple(it - 256 if it > 127 else it for it in identity) if signed_ids else identity

    nccl = types.SimpleNamespace(
        available=True,
        NCCL_SUM=0,
        NCCL_FLOAT32=0,
        NCCL_FLOAT64=1,
        NCCL_INT64=2,
        NcclError=NcclError,
        NcclCommunicator=Communicator,
        get_unique_id=unique_id,
        get_version=lambda: version,
        groupStart=lambda: None,
        groupEnd=lambda: None,
    )
    cupy.cuda = types.SimpleNamespace(  # type: ignore[attr-defined]
        nccl=nccl,
        Stream=Stream,
        Event=Event,
        Device=Device,
        get_current_stream=Stream,
        runtime=types.SimpleNamespace(deviceGetPCIBusId=lambda device: buses[device]),
    )
    cupy.ascontiguousarray = lambda array: np.ascontiguousarray(array).view(GpuArray)  # type: ignore[attr-defined]
    cupy.empty = lambda shape, dtype: np.empty(shape, dtype).view(GpuArray)  # type: ignore[attr-defined]
    return cupy
