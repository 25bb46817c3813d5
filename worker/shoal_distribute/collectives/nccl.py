"""NCCL between processes: sums of arrays on GPUs, for groups whose ranks each have a GPU of their own.

`NcclSums` is for arrays on GPUs what `Buckets` is for arrays in the memory of hosts. The group itself only brings the
ranks together, compares what they do, and tells when one of them has failed: NCCL alone would wait for it.
"""

import hashlib
import struct
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from shoal import errors
from shoal._system import host_id
from shoal._system.logs import Log
from shoal.program import Array
from shoal_distribute.collectives.group import Group
from shoal_distribute.collectives.options import CommunicationImplementation, CommunicationOptions
from shoal_distribute.threads import start_thread

_log = Log(__name__)

# The module CuPy; no type describes it.
_Cupy = Any
_OFFER = struct.Struct("<B16s16sI")
_WISHES = list(CommunicationImplementation)
# A step that is not done after so many looks is looked at every so many seconds, and the other ranks with it.
_LOOKS, _LOOK_S = 100, 1e-4
# Names of NCCL's dtypes. CuPy 13 does not have all of them.
_NAMES = {
    "float16": "NCCL_FLOAT16",
    "bfloat16": "NCCL_BFLOAT16",
    "float32": "NCCL_FLOAT32",
    "float64": "NCCL_FLOAT64",
    "int8": "NCCL_INT8",
    "uint8": "NCCL_UINT8",
    "int32": "NCCL_INT32",
    "uint32": "NCCL_UINT32",
    "int64": "NCCL_INT64",
    "uint64": "NCCL_UINT64",
}


@dataclass(frozen=True, slots=True)
class _Offer:
    """What a rank can do.

    Attributes:
        wish: the implementation that it was told to use.
        host, gpu: digests of what identifies its host and its GPU.
        version: version of its NCCL; 0 if it has none, or computes on a CPU.
    """

    wish: CommunicationImplementation
    host: bytes
    gpu: bytes
    version: int

    def encode(self) -> np.ndarray[Any, Any]:
        return np.frombuffer(_OFFER.pack(_WISHES.index(self.wish), self.host, self.gpu, self.version), np.uint8)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        wish, host, gpu, version = _OFFER.unpack(data)
        return cls(_WISHES[wish], host, gpu, version)


class NcclSums:
    """Sums of a step's arrays over all ranks of a group, each started as soon as it is added.

        for name, gradient in backward(...):
            sums.add(name, gradient)
        gradients = sums.finish()

    All ranks add the same names in the same order, with the same shapes and dtypes, and get the same bits. NCCL adds on
    a CUDA stream of its own, beside the computation on the caller's stream. One thread uses it, on which the GPU is the
    current device. `open_nccl` makes it.

    Args:
        group: the group.
        cupy: the module CuPy.
        communicator: NCCL's communicator of all ranks.
        nbytes: so many bytes of arrays are started together.
    """

    def __init__(self, group: Group, cupy: _Cupy, communicator: Any, nbytes: int) -> None:
        self._group, self._cupy, self._communicator, self._nbytes = group, cupy, communicator, nbytes
        self._stream = cupy.cuda.Stream(non_blocking=True)
        self._waiting: dict[str, Array] = {}  # arrays that are not started
        self._sums: dict[str, Array] = {}
        self._read: list[Array] = []  # arrays that NCCL may still read
        self._failure: errors.ShoalError | None = None
        self._layout = hashlib.sha256()  # of all arrays that were ever started, which all ranks must have alike

    def takes(self, dtype: Any) -> bool:
        """Returns whether NCCL can add numbers of this dtype."""
        return hasattr(self._cupy.cuda.nccl, _NAMES.get(str(dtype), ""))

    def add(self, name: str, array: Array) -> None:
        """Adds an array to the step. It must not change before `finish`.

        Args:
            name: its name, unique in the step.
            array: an array on the GPU.

        Raises:
            BadRequest: the name was added twice, or NCCL cannot add arrays of this dtype.
            RankLost, RanksDisagree, InternalError: an earlier step has failed.
        """
        if self._failure:
            raise self._failure
        if name in self._sums or name in self._waiting:
            raise errors.BadRequest(f"{name!r} was added twice in one step; give each array its own name")
        nccl_type(self._cupy.cuda.nccl, array.dtype)
        self._waiting[name] = self._cupy.ascontiguousarray(array).reshape(array.shape)
        if sum(it.nbytes for it in self._waiting.values()) >= self._nbytes:
            self._start()

    def finish(self) -> dict[str, Array]:
        """Waits until all sums of the step are there.

        Returns:
            The sums by name, in the order in which the arrays were added: new arrays on the GPU.

        Raises:
            RankLost, RanksDisagree: a rank has ended, or has added other arrays.
            InternalError: NCCL has failed.
        """
        self._start()
        if not self._sums:
            return {}
        done = self._cupy.cuda.Event(disable_timing=True)
        done.record(self._stream)
        try:
            self._agree()
            began = time.perf_counter()
            self._wait(done)
        except errors.ShoalError as error:
            self._failure = error
            self._communicator.abort()  # what it has begun may never end
            raise
        self._group.times.transfer += time.perf_counter() - began
        self._read.clear()
        sums, self._sums = self._sums, {}
        return sums

    @property
    def in_step(self) -> bool:
        """Whether arrays were added since the last `finish`."""
        return bool(self._sums or self._waiting)

    def pause(self) -> None:
        """Does nothing: the group is free in the middle of a step, because NCCL has connections of its own."""

    def abandon(self) -> None:
        """Ends a step that this rank cannot complete. If others complete it, the next step raises RanksDisagree."""
        self._waiting.clear()
        self._read += self._sums.values()
        self._sums = {}

    def close(self) -> None:
        """Ends NCCL's communicator, also in the middle of a step."""
        if self._read:
            self._communicator.abort()
        else:
            self._communicator.destroy()

    def _start(self) -> None:
        """Starts the sums of all arrays that wait."""
        if not self._waiting:
            return
        cuda, nccl = self._cupy.cuda, self._cupy.cuda.nccl
        for name, array in self._waiting.items():
            self._layout.update(repr((name, array.shape, str(array.dtype))).encode())
            self._sums[name] = self._cupy.empty(array.shape, array.dtype)
            self._read.append(array)
        computed = cuda.Event(disable_timing=True)
        computed.record(cuda.get_current_stream())
        self._stream.wait_event(computed)
        try:
            pairs = [(array, self._sums[name]) for name, array in self._waiting.items()]
            start_sums(nccl, self._communicator, pairs, self._stream.ptr)
        except nccl.NcclError as error:
            raise _failed(self._group, error) from error
        self._waiting.clear()

    def _agree(self) -> None:
        """Checks that all ranks have added the same arrays, while NCCL adds them."""
        digest = self._layout.digest()
        for rank, theirs in enumerate(self._group.all_gather(np.frombuffer(digest, np.uint8))):
            if theirs.tobytes() != digest:
                raise errors.RanksDisagree(
                    f"rank {rank} has added other arrays than rank {self._group.rank}; all ranks must add the same "
                    f"names and shapes in the same order. This step had {', '.join(map(repr, [*self._sums][:5]))}",
                    rank=rank,
                )

    def _wait(self, done: Any) -> None:
        looks = 0
        while not done.done:
            looks += 1
            if looks > _LOOKS:
                time.sleep(_LOOK_S)
                self._group.check()
                try:
                    self._communicator.check_async_error()
                except self._cupy.cuda.nccl.NcclError as error:
                    raise _failed(self._group, error) from error


def open_nccl(group: Group, options: CommunicationOptions, cupy: _Cupy, device: int) -> NcclSums | None:
    """Returns the sums by NCCL of a group, if its ranks can have them. All ranks call it.

    Args:
        group: the group.
        options: the options, the same at all ranks.
        cupy: the module CuPy; None if this rank computes on a CPU.
        device: number of this rank's GPU, which is the current device.

    Returns:
        The sums. None if a ring joins the arrays: see `CommunicationImplementation`.

    Raises:
        DeviceUnavailable: the options ask for NCCL, and the ranks cannot have it.
        RankLost, RanksDisagree: see `Group`.
        InternalError: NCCL has failed.
    """
    if group.ranks == 1:
        return None
    wish = CommunicationImplementation(options.implementation)
    own = _offer(wish, cupy, device)
    offers = [_Offer.decode(it.tobytes()) for it in group.all_gather(own.encode())]
    if obstacle := _obstacle(offers):
        if wish is CommunicationImplementation.NCCL:
            raise errors.DeviceUnavailable(f"NCCL cannot join these processes: {obstacle}", device=f"/gpu:{device}")
        if own.version and wish is CommunicationImplementation.AUTO:
            _log.info("gradients travel through host memory", reason=obstacle)
        return None
    return NcclSums(group, cupy, _communicator(group, cupy, device), options.pack_bytes)


def start_sums(nccl: Any, communicator: Any, pairs: Sequence[tuple[Array, Array]], stream: int) -> None:
    """Starts the sums of arrays over all ranks of a communicator, in one group of NCCL's calls.

    Args:
        nccl: the module `cupy.cuda.nccl`.
        communicator: NCCL's communicator.
        pairs: each array, contiguous, with the memory of its sum.
        stream: pointer of the CUDA stream.

    Raises:
        BadRequest: NCCL cannot add such numbers.
    """
    kinds = [nccl_type(nccl, out.dtype) for _, out in pairs]
    nccl.groupStart()
    for (array, out), kind in zip(pairs, kinds, strict=True):
        communicator.allReduce(array.data.ptr, out.data.ptr, out.size, kind, nccl.NCCL_SUM, stream)
    nccl.groupEnd()


def nccl_type(nccl: Any, dtype: Any) -> int:
    """Returns NCCL's number of a dtype.

    Args:
        nccl: the module `cupy.cuda.nccl`.
        dtype: the dtype.

    Raises:
        BadRequest: NCCL cannot add such numbers.
    """
    number: int | None = getattr(nccl, _NAMES.get(str(dtype), ""), None)
    if number is None:
        there = [name for name, constant in _NAMES.items() if hasattr(nccl, constant)]
        raise errors.BadRequest(f"NCCL cannot add {dtype}; give one of {', '.join(there)}")
    return number


def _offer(wish: CommunicationImplementation, cupy: _Cupy, device: int) -> _Offer:
    host = hashlib.sha256(host_id().encode()).digest()[:16]
    if cupy is None or not cupy.cuda.nccl.available:
        return _Offer(wish, host, bytes(16), 0)
    where = f"{host_id()} {cupy.cuda.runtime.deviceGetPCIBusId(device)}"
    return _Offer(wish, host, hashlib.sha256(where.encode()).digest()[:16], cupy.cuda.nccl.get_version())


def _obstacle(offers: Sequence[_Offer]) -> str:
    """Returns why the ranks cannot use NCCL; "" if they can. It is the same text at all ranks."""
    for rank, offer in enumerate(offers):
        if offer.wish is CommunicationImplementation.RING:
            return f"rank {rank} was told to use the ring"
        if not offer.version:
            return f"rank {rank} computes on a CPU, or its CuPy has no NCCL"
        if offer.version != offers[0].version:
            return f"rank {rank} has NCCL {offer.version}, and rank 0 has {offers[0].version}"
        if (first := [it.gpu for it in offers].index(offer.gpu)) != rank:
            return f"ranks {first} and {rank} have the same GPU"
    several = len({offer.host for offer in offers}) > 1
    if several and any(offer.wish is CommunicationImplementation.AUTO for offer in offers):
        return (
            "the ranks are on several hosts, between which NCCL does not encrypt. In a network that you trust, give "
            'communication_options=CommunicationOptions(implementation="nccl")'
        )
    return ""


def _communicator(group: Group, cupy: _Cupy, device: int) -> Any:
    """Makes NCCL's communicator with all ranks, on a thread: NCCL itself does not see that a rank has ended."""
    nccl = cupy.cuda.nccl
    made: list[Any] = []
    failures: list[Exception] = []
    ended = threading.Event()
    identity = np.zeros(128, np.uint8)
    try:
        if group.rank == 0:
            identity[:] = np.array([it & 0xFF for it in nccl.get_unique_id()], np.uint8)
    except nccl.NcclError as error:
        raise _failed(group, error) from error
    group.broadcast(identity)

    def make() -> None:
        try:
            cupy.cuda.Device(device).use()
            made.append(_joined(nccl, group, identity.tobytes()))
        except Exception as error:
            failures.append(error)
        ended.set()

    start_thread(make, f"rank {group.rank} joins NCCL")
    while not ended.wait(_LOOK_S):
        group.check()
    if failures:
        raise _failed(group, failures[0]) from failures[0]
    return made[0]


def _joined(nccl: Any, group: Group, identity: bytes) -> Any:
    try:
        return nccl.NcclCommunicator(group.ranks, identity, group.rank)
    except TypeError:  # CuPy 13 takes a tuple of signed numbers
        signed = tuple(np.frombuffer(identity, np.int8).tolist())
        return nccl.NcclCommunicator(group.ranks, signed, group.rank)


def _failed(group: Group, error: Exception) -> errors.ShoalError:
    """Ends the group, and returns the error that says so."""
    failure = errors.InternalError(
        f"NCCL failed at rank {group.rank}: {error}. NCCL_DEBUG=WARN makes it say more; "
        'CommunicationOptions(implementation="ring") does without it'
    )
    group.fail(failure)
    return failure


__all__ = ["NcclSums", "open_nccl", "start_sums"]
