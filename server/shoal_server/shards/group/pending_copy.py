"""Pending copy: a copy for a backup, which begins when the open step of the lock group has no contribution."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shoal._memory.buffers import BufferPool
from shoal.v1 import replica_pb2
from shoal_server.shards.group.input_log import InputLog
from shoal_server.shards.group.pending_moment import PendingMoment
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.values import Payload, Snapshot, StoredShards


@dataclass(frozen=True, slots=True)
class CopyStart:
    """A lock group at one moment: what a copy begins with.

    Attributes:
        state: the state of its machine.
        gradients: the arrays of its staged pushes, by the number that `state` has for them. They are copies.
        snapshots: the values and slots of each slab. The owner calls `end`.
    """

    state: replica_pb2.GroupState
    gradients: Mapping[int, Payload]
    snapshots: Sequence[Snapshot]

    def end(self) -> None:
        """Lets later updates change the memory of the values."""
        for snapshot in self.snapshots:
            snapshot.end_saving()


class PendingCopy(PendingMoment):
    """A copy that begins at a moment which the group chooses.

    Args:
        job: name of the job, for messages.
        log: gets the inputs from that moment on.
    """

    def __init__(self, job: str, log: InputLog) -> None:
        super().__init__(job)
        self.log = log
        self._start: CopyStart | None = None

    def begin(self, state: GroupState, stored: StoredShards, memory: BufferPool) -> bool:
        """Begins the copy if this is possible now. Called with the lock of the group.

        Args:
            state: the machine.
            stored: the shards.
            memory: provides memory for copies of gradients.

        Returns:
            Whether it has begun: from now on, the log gets all inputs.
        """
        if not state.is_copyable:
            return False
        message, gradients = replica_pb2.GroupState(), dict[int, Payload]()

        def number_of(payload: Payload) -> int:
            # A commit may add the arrays to a sum before they are sent, so they are copied.
            number = self.log.sender.next_gradient()
            gradients[number] = {index: _copied(array, memory) for index, array in payload.items()}
            return number

        state.write_to(message, number_of, self.log.sender.ticket)
        snapshots = [slab.latest(state.version) for slab in stored.slabs]
        for snapshot in snapshots:
            snapshot.begin_saving()
        self._start = CopyStart(message, gradients, snapshots)
        self._ended.set()
        return True

    @property
    def begun(self) -> bool:
        """Whether the copy has begun."""
        return self._start is not None

    def wait(self, within_s: float) -> CopyStart | None:
        """Waits until the copy has begun, and returns its start; None if it has not begun in time.

        Args:
            within_s: seconds to wait at most.

        Raises:
            ShoalError: the group is closed.
        """
        self._await_end(within_s)
        return self._start


def _copied(array: np.ndarray, memory: BufferPool) -> np.ndarray:
    copy: Any = memory.take(array.nbytes).view(array.dtype)
    copy[...] = array
    return np.asarray(copy)


__all__ = ["CopyStart", "PendingCopy"]
