"""Buckets: gradients are reduced a few MiB at a time, by a thread, while the backward pass computes the next ones.

The idea is that of PyTorch's DistributedDataParallel (Li et al., "PyTorch distributed: experiences on accelerating data
parallel training", VLDB 2020). Few large all-reduces cost less than many small ones, and they overlap with computation.
"""

import hashlib
import math
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np

from shoal import _tracing, errors
from shoal_distribute.collectives.calls import ReduceOp
from shoal_distribute.collectives.group import Group
from shoal_distribute.collectives.options import BUCKET_BYTES
from shoal_distribute.threads import start_thread


@dataclass(slots=True)
class _Bucket:
    """Some arrays of one dtype, one after the other in memory."""

    flat: np.ndarray[Any, Any]
    views: dict[str, np.ndarray[Any, Any]] = field(default_factory=dict)
    used: int = 0  # elements

    def digest(self) -> bytes:
        """Returns a number that tells whether two ranks have packed the same arrays."""
        shapes = [(name, view.shape, view.dtype.name) for name, view in self.views.items()]
        return hashlib.sha256(repr(shapes).encode()).digest()


class Buckets:
    """Reduces the arrays of a step as they are added, on a thread. The end of a `with` block ends the thread.

        for name, gradient in backward(...):
            buckets.add(name, gradient)
        gradients = buckets.finish()

    All ranks add the same names in the same order, with the same shapes and dtypes. Between the first `add` of a step
    and the end of `finish`, nothing else may use the group, except between a `pause` and the next `add`.

    All ranks get the same bits. If the group has one or two `Group.hosts`, a separate `all_reduce` of each array gives
    these bits, too. In a ring of more hosts, the order in which an element's parts are added depends on its place in
    the bucket, so another `nbytes` may change the last bits.

    Args:
        group: the group.
        nbytes: bytes of a bucket. A larger array has a bucket of its own.
        op: how arrays are joined.
    """

    def __init__(self, group: Group, *, nbytes: int = BUCKET_BYTES, op: ReduceOp = ReduceOp.SUM) -> None:
        self._group, self._nbytes, self._op = group, nbytes, op
        self._open: dict[np.dtype[Any], _Bucket] = {}  # the buckets that are not full
        self._step: list[_Bucket] = []  # those of this step, or of the last one until the next one begins
        self._free: dict[np.dtype[Any], list[np.ndarray[Any, Any]]] = {}
        self._finished = True
        self._handed_over = False  # whether the thread has got a bucket of this step
        self._names: dict[str, None] = {}  # of this step, in their order
        self._agreed: set[bytes] = set()  # digests of buckets that all ranks have packed alike
        self._full: queue.SimpleQueue[tuple[Callable[[_Bucket], None], _Bucket] | threading.Event | None] = (
            queue.SimpleQueue()
        )
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None

    def add(self, name: str, array: np.ndarray[Any, Any]) -> None:
        """Adds an array to the step. It is copied, so the caller may change it afterwards.

        Args:
            name: its name, unique in the step.
            array: an array of numbers.

        Raises:
            BadRequest: the name was added twice, or see `Group.all_reduce`.
            RankLost, RanksDisagree: an earlier bucket of the step has failed.
        """
        if self._finished:
            self._begin()
        if self._failure:
            raise self._failure
        if name in self._names:
            raise errors.BadRequest(f"{name!r} was added twice in one step; give each array its own name")
        self._names[name] = None
        bucket = self._open.get(array.dtype)
        if bucket and bucket.used + array.size > bucket.flat.size:
            self._hand_over(bucket)
            bucket = None
        if bucket is None:
            bucket = self._open[array.dtype] = _Bucket(self._memory(array))
            self._step.append(bucket)
        view = bucket.flat[bucket.used : bucket.used + array.size].reshape(array.shape)
        np.copyto(view, array)
        bucket.views[name] = view
        bucket.used += array.size
        if bucket.used * array.itemsize >= self._nbytes:
            self._hand_over(bucket)

    def finish(self) -> dict[str, np.ndarray[Any, Any]]:
        """Waits until all arrays of the step are reduced.

        Returns:
            The results by name, in the order in which they were added, as views. They are valid until the next step.

        Raises:
            BadRequest, RankLost, RanksDisagree: see `Group.all_reduce`.
        """
        if self._finished:
            return {}  # nothing was added
        last = list(self._open.values())
        self._open.clear()
        self._wait()
        for bucket in last:
            self._try(bucket)  # by this thread: it would only wait for the other one
        self._finished = True
        if self._failure:
            raise self._failure
        reduced = {name: view for bucket in self._step for name, view in bucket.views.items()}
        return {name: reduced[name] for name in self._names}

    def pause(self) -> None:
        """Waits for the buckets that are in progress. Then the caller may use the group until the next `add`.

        All ranks call it between the same two arrays.
        """
        if not self._finished:
            self._wait()

    def abandon(self) -> None:
        """Ends a step that this rank cannot complete: waits for the buckets that are in progress, and drops the rest.

        If the other ranks complete the step, the next call of the group raises RanksDisagree.
        """
        if not self._finished:
            self._open.clear()
            self._wait()
            self._finished = True

    def close(self) -> None:
        """Ends the thread. If a step is not finished, the thread ends when the group is closed."""
        if self._thread:
            self._full.put(None)
            if self._finished:
                self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self) -> None:
        for bucket in self._step:
            self._free.setdefault(bucket.flat.dtype, []).append(bucket.flat)
        self._step, self._finished, self._handed_over = [], False, False
        self._names.clear()

    def _memory(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns memory for a bucket that begins with an array."""
        elements = max(math.ceil(self._nbytes / array.itemsize), array.size)
        free = self._free.get(array.dtype, [])
        for place, flat in enumerate(free):
            if flat.size == elements:
                return free.pop(place)
        return np.empty(elements, array.dtype)

    def _hand_over(self, bucket: _Bucket) -> None:
        del self._open[bucket.flat.dtype]
        if self._thread is None:
            self._thread = start_thread(self._reduce_all, f"rank {self._group.rank} reduces")
        self._handed_over = True
        self._full.put((_tracing.in_current_context(self._try), bucket))

    def _wait(self) -> None:
        """Waits until the thread has reduced all buckets that it has got."""
        if self._handed_over:
            done = threading.Event()
            self._full.put(done)
            done.wait()

    def _reduce_all(self) -> None:
        while (item := self._full.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            else:
                reduce, bucket = item
                reduce(bucket)

    def _try(self, bucket: _Bucket) -> None:
        if self._failure is None:
            try:
                self._reduce(bucket)
            except BaseException as error:
                self._failure = error

    def _reduce(self, bucket: _Bucket) -> None:
        digest = bucket.digest()
        if digest not in self._agreed:
            self._check(bucket, digest)
            self._agreed.add(digest)
        self._group.all_reduce(bucket.flat[: bucket.used], self._op)

    def _check(self, bucket: _Bucket, digest: bytes) -> None:
        """Checks that all ranks have packed the same arrays. Sizes alone do not tell that."""
        for rank, theirs in enumerate(self._group.all_gather(np.frombuffer(digest, np.uint8))):
            if theirs.tobytes() != digest:
                first = next(iter(bucket.views))
                raise errors.RanksDisagree(
                    f"rank {rank} has other arrays than rank {self._group.rank} in the bucket that begins with "
                    f"{first!r}; all ranks must add the same names and shapes in the same order",
                    rank=rank,
                )


__all__ = ["Buckets"]
