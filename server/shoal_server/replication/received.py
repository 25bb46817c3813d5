"""Received gradients: what has arrived for a backup, and no input has used yet, within a limit of bytes."""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from weakref import finalize

import numpy as np

from shoal import errors
from shoal._limits import catalogue
from shoal._memory.buffers import BufferPool
from shoal._system.memory import memory_limit
from shoal._transport import Connection
from shoal.v1 import replica_pb2
from shoal_server.optimizers import conversions
from shoal_server.replication.pieces import RegionLayout, fill, received_place
from shoal_server.shards import LockGroup, Payload

# Share of the memory limit that the gradients and inputs of all backups of a server may take.
_PERCENT = 25
# Bytes that an array takes besides its elements, and an input besides its message.
_OVERHEAD_BYTES = 1024


class ReplicaMemory:
    """Counts the bytes of gradients and inputs that the backups of one server keep. Thread-safe.

    Args:
        most_bytes: the limit; None means a share of the memory of the container or the machine.
    """

    def __init__(self, most_bytes: int | None = None) -> None:
        self._most = memory_limit() * _PERCENT // 100 if most_bytes is None else most_bytes
        self._lock = threading.Lock()  # guards _used; nothing is called under it
        self._used = 0
        # Added to without the lock, because the garbage collector may do so on a thread that holds it.
        self._returned: deque[int] = deque()

    @property
    def used(self) -> int:
        """The bytes in use."""
        with self._lock:
            self._settle()
            return self._used

    def take(self, nbytes: int, job: str) -> None:
        """Counts bytes before they are allocated.

        Raises:
            LimitExceeded: there would be too many.
        """
        with self._lock:
            self._settle()
            used = self._used + nbytes
            if used <= self._most:
                self._used = used
                return
        raise catalogue.REPLICA_BYTES.refusal(
            f"the gradients and inputs of {job} would take {used} bytes with those of the server's other backups",
            "the copy is tried again; give the server more memory",
            limit=self._most,
        )

    def give_back(self, nbytes: int) -> None:
        """Counts bytes that are free again. Never waits."""
        self._returned.append(nbytes)

    def _settle(self) -> None:
        while self._returned:
            self._used -= self._returned.popleft()


class ReceivedGradients:
    """The gradients that have arrived for one backup, and that no input has named yet.

    Args:
        group: the backup.
        pool: provides memory for gradients.
        memory: counts it. A gradient counts until nothing refers to its arrays.
        region: returns the bytes of a region of the lane's segment, by its number, or raises BadRequest.
    """

    def __init__(
        self, group: LockGroup, pool: BufferPool, memory: ReplicaMemory, region: Callable[[int], np.ndarray]
    ) -> None:
        self._group, self._pool, self._memory, self._region = group, pool, memory, region
        self._layout = RegionLayout(group.slab_values)
        self._gradients: dict[int, Payload] = {}
        self._filled: dict[tuple[int, int], int] = {}  # elements that have arrived, by gradient and slab

    def receive(self, lane: Connection) -> None:
        """Receives a piece of a gradient, whose frame has begun.

        Raises:
            BadFrame: the piece does not fit. The pieces of an array come in order, so that none is left out.
            LimitExceeded: there is no memory for it.
        """
        place, taken = received_place(lane)
        key, values = (place.gradient, place.slab), self._group.array(place.slab, "")
        if place.start != self._filled.get(key, 0):
            raise errors.BadFrame(
                f"{lane.peer} sent element {place.start} of gradient {place.gradient} after {self._filled.get(key, 0)} "
                "elements"
            )
        if key not in self._filled:
            self._gradients.setdefault(place.gradient, {})[place.slab] = self._new(values.size, values.dtype)
        array = self._gradients[place.gradient][place.slab]
        if not place.region:
            self._filled[key] = place.start + fill(lane, taken, array, place.start)
            return
        lane.payload()
        conversions.send_all([(array, self._layout.array(self._region(place.region), place.slab))])
        self._filled[key] = array.size

    def _new(self, elements: int, dtype: np.dtype) -> np.ndarray:
        nbytes = elements * dtype.itemsize
        self._memory.take(nbytes + _OVERHEAD_BYTES, self._group.config.name)
        array: np.ndarray = self._pool.take(nbytes).view(dtype)
        finalize(array, self._memory.give_back, nbytes + _OVERHEAD_BYTES).atexit = False
        return array

    def take(self, number: int) -> Payload:
        """Returns a gradient that an input names, and forgets it. It is empty if the primary has not read it.

        Raises:
            BadFrame: a part of it is missing. Its memory may have values of other jobs.
        """
        payload = self._gradients.pop(number, {})
        filled = {slab: self._filled.pop((number, slab)) for slab in payload}
        if any(filled[slab] != array.size for slab, array in payload.items()):
            raise errors.BadFrame(f"an input of {self._group.config.name} names gradient {number}, which is incomplete")
        return payload

    def drop(self, number: int) -> None:
        """Forgets a gradient that no input will name."""
        for slab in self._gradients.pop(number, {}):
            del self._filled[number, slab]

    def clear(self) -> None:
        """Forgets all gradients."""
        self._gradients.clear()
        self._filled.clear()


class EarlyInputs:
    """The inputs that arrive before a backup has all values.

    Args:
        job: name of the job, for messages.
        memory: counts them.
    """

    def __init__(self, job: str, memory: ReplicaMemory) -> None:
        self._job, self._memory = job, memory
        self._inputs: list[replica_pb2.ReplicaInput] = []
        self._nbytes = 0

    def add(self, inputs: Iterable[replica_pb2.ReplicaInput]) -> None:
        """Keeps inputs.

        Raises:
            LimitExceeded: there is no memory for them.
        """
        added = [*inputs]
        nbytes = sum(it.ByteSize() + _OVERHEAD_BYTES for it in added)
        self._memory.take(nbytes, self._job)
        self._nbytes += nbytes
        self._inputs += added

    def take(self) -> list[replica_pb2.ReplicaInput]:
        """Returns the inputs, and forgets them."""
        self._memory.give_back(self._nbytes)
        taken, self._inputs, self._nbytes = self._inputs, [], 0
        return taken


__all__ = ["EarlyInputs", "ReceivedGradients", "ReplicaMemory"]
