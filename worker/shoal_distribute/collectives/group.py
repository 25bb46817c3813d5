"""Group: a number of ranks, in processes or threads, that make collective calls."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from shoal import _tracing, errors
from shoal._transport import SHM, Security
from shoal_distribute.collectives.calls import Collective, CollectiveCall, ReduceOp, layout_of
from shoal_distribute.collectives.connections import Connections
from shoal_distribute.collectives.host_rings import HostRings
from shoal_distribute.collectives.meeting import connect
from shoal_distribute.collectives.members import Members, SubgroupMesh
from shoal_distribute.collectives.mesh import Mesh
from shoal_distribute.collectives.schedule import slices
from shoal_distribute.collectives.shared_blocks import SharedBlocks
from shoal_distribute.collectives.shared_hosts import find_hosts
from shoal_distribute.collectives.times import GroupTimings, RankTimes
from shoal_distribute.collectives.watch import SILENT_S
from shoal_distribute.collectives.way import Way

A = TypeVar("A", bound=np.ndarray[Any, Any])


class Group:
    """One rank of a group, which calls each collective at the same time as all others.

    All ranks must make the same calls in the same order, with arrays of the same shape and dtype. Each rank gets the
    same bits: a sum is added in one order, once. If a rank ends, stalls or makes another call, all ranks get an error
    that names it within seconds, and the group cannot be used any more.

    Ranks on one host use shared memory, and connections between hosts. The order in which a sum is added depends on
    these hosts, on the size of the array and on the place of an element in it, and on nothing else.

        with Group.open(rank, ["host-a:7100", "host-b:7100"], security=security) as group:
            group.all_reduce(gradient, ReduceOp.MEAN)

    `open` makes groups. One thread may use a group at a time.

    Args:
        mesh: the connections of this rank.
        stop: called when the mesh is closed.
        share: whether to use shared memory between ranks on one host.
        directory: see `open`.

    Attributes:
        rank: this rank, from 0.
        ranks: number of ranks.
        hosts: the ranks of each host, as far as they use shared memory. The others are alone.
    """

    def __init__(self, mesh: Mesh, stop: Callable[[], None], *, share: bool = True, directory: Path = SHM) -> None:
        self.rank, self.ranks = mesh.rank, mesh.ranks
        self._mesh, self._stop = mesh, stop
        self._share, self._directory = share, directory
        self._calls = 0
        everyone = Members(mesh, tuple(range(self.ranks)))
        self._way: Way = Connections(everyone)
        self.hosts: tuple[tuple[int, ...], ...] = tuple((rank,) for rank in everyone.ranks)
        if share and self.ranks > 1:
            self.hosts, segments = find_hosts(self.all_gather, self.rank, directory)
            if len(self.hosts) == 1:
                self._way = SharedBlocks(everyone, segments)
            elif len(self.hosts) < self.ranks:
                self._way = HostRings(mesh, self.hosts, segments)

    @classmethod
    def open(
        cls,
        rank: int,
        addresses: Sequence[str],
        *,
        security: Security,
        listening: socket.socket | None = None,
        generation: int = 0,
        within_s: float = 60.0,
        silent_s: float = SILENT_S,
        share: bool = True,
        directory: Path = SHM,
    ) -> Self:
        """Connects this process with the other ranks.

        Args:
            rank: this rank.
            addresses: host:port of each rank.
            security: protects the connections, and proves that a process belongs to the group.
            listening: a bound socket that listens at this rank's address. None means that this function makes one.
            generation: number of the group. Ranks of another generation are refused.
            within_s: seconds to wait for the other ranks.
            silent_s: seconds without a heartbeat after which a rank counts as lost. A rank sends one each second,
                even while it computes. So only a process that is stopped, or a host that cannot be reached, sends none.
            share: whether to use shared memory between ranks on one host. All ranks must give the same value.
            directory: the folder for shared memory, a tmpfs. Ranks are on one host if they can map each other's files
                in it.

        Returns:
            The group.

        Raises:
            BadRequest: an address is not host:port, or there are too many.
            RankLost: a rank did not come in time. The message names it.
            RanksDisagree: two processes have the same rank, or give different numbers of ranks.
        """
        mesh, stop = connect(
            rank,
            addresses,
            security=security,
            listening=listening,
            generation=generation,
            within_s=within_s,
            silent_s=silent_s,
        )
        try:
            return cls(mesh, stop, share=share, directory=directory)
        except BaseException:
            mesh.close()
            stop()
            raise

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one host, and use shared memory alone."""
        return 1 == len(self.hosts) < self.ranks

    @property
    def sent_bytes(self) -> int:
        """The bytes of array data that this rank has sent over connections."""
        return self._mesh.sent_bytes

    @property
    def rounds(self) -> int:
        """The number of communication rounds so far. In each, this rank waits for data from another one."""
        return self._mesh.rounds

    @property
    def times(self) -> RankTimes:
        """The times of this rank since the group began. Their `seconds` is 0."""
        return self._mesh.times.own

    def timings(self) -> GroupTimings:
        """Returns the times of all ranks over the last minute, as their heartbeats have told them: 1 s late or less."""
        return self._mesh.times.timings()

    def all_reduce(self, array: A, op: ReduceOp = ReduceOp.SUM, *, layout: object = None) -> A:
        """Replaces an array by the sum or the mean of the arrays of all ranks.

        Args:
            array: a contiguous, writable array of numbers.
            op: how the arrays are joined.
            layout: what the elements are, for an array that packs several: their shapes, for example. It must have
                the same `repr` in all ranks. None means the array's shape.

        Returns:
            The same array.

        Raises:
            BadRequest: the array is not contiguous, writable or numeric, or MEAN is asked of integers.
            RankLost, RanksDisagree: see the class.
        """
        flat = _flat(array, op)
        with self._call(Collective.ALL_REDUCE, flat, layout or array.shape, op):
            self._way.all_reduce(flat, op)
        return array

    def reduce_scatter(self, array: np.ndarray[Any, Any], op: ReduceOp = ReduceOp.SUM) -> np.ndarray[Any, Any]:
        """Gives each rank one slice of the sum or the mean of all arrays.

        Args:
            array: as for `all_reduce`. Its other elements are undefined afterwards.
            op: how the arrays are joined.

        Returns:
            A view of this rank's slice of the flattened array (`schedule.slices`).

        Raises:
            BadRequest, RankLost, RanksDisagree: as for `all_reduce`.
        """
        flat = _flat(array, op)
        parts = slices(flat.size, self.ranks)
        with self._call(Collective.REDUCE_SCATTER, flat, array.shape, op):
            self._way.reduce_scatter(flat, [[it] for it in parts], op)
        return flat[parts[self.rank]]

    def all_gather(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Returns the arrays of all ranks.

        Args:
            array: any array of numbers. All ranks have the same shape.

        Returns:
            A new array of shape (ranks, *array.shape).

        Raises:
            BadRequest: the array is not numeric.
            RankLost, RanksDisagree: see the class.
        """
        gathered = np.empty((self.ranks, *array.shape), array.dtype)
        gathered[self.rank] = array
        flat = _flat(gathered, ReduceOp.SUM)
        with self._call(Collective.ALL_GATHER, flat, array.shape):
            self._way.all_gather(flat, [[it] for it in slices(flat.size, self.ranks)])
        return gathered

    def broadcast(self, array: A, root: int = 0) -> A:
        """Replaces an array by that of one rank.

        Args:
            array: a contiguous, writable array of numbers.
            root: the rank whose array all get.

        Returns:
            The same array.

        Raises:
            BadRequest: there is no such rank, or as for `all_reduce`.
            RankLost, RanksDisagree: see the class.
        """
        if not 0 <= root < self.ranks:
            raise errors.BadRequest(f"root is {root}; a group of {self.ranks} has the ranks 0 to {self.ranks - 1}")
        flat = _flat(array, ReduceOp.SUM)
        with self._call(Collective.BROADCAST, flat, array.shape, root=root):
            self._way.broadcast(flat, root)
        return array

    def barrier(self) -> None:
        """Waits until all ranks have called it.

        Raises:
            RankLost, RanksDisagree: see the class.
        """
        with self._call(Collective.BARRIER, np.zeros(0, np.uint8), ()):
            self._way.barrier()

    def subgroup(self, ranks: Sequence[int], *, share: bool = True) -> "Group":
        """Returns a group of some ranks of this one. All of them call it, with the same list.

        A failure ends all groups of these ranks. The calls of a rank must have the same order in all groups together.

        Args:
            ranks: the ranks, which have the numbers of their places in the new group.
            share: whether ranks on one host use shared memory, if those of this group do. Without it, the order in
                which a sum is added does not depend on the hosts.

        Raises:
            BadRequest: this rank is not in the list.
            RankLost, RanksDisagree: see the class.
        """
        if self.rank not in ranks:
            raise errors.BadRequest(f"rank {self.rank} cannot be in a subgroup of the ranks {list(ranks)}")
        mesh = SubgroupMesh(Members(self._mesh, tuple(ranks)))
        return Group(mesh, lambda: None, share=self._share and share, directory=self._directory)

    def name_ranks(self, names: Mapping[int, str]) -> None:
        """Sets what errors call ranks besides their numbers.

        Args:
            names: the names by rank.
        """
        self._mesh.name_ranks(names)

    def agree(self, what: str) -> None:
        """Makes sure that all ranks are about to do the same, such as a step in which they pass arrays.

        Raises:
            RankLost, RanksDisagree: see the class.
        """
        with self._call(Collective.AGREE, np.zeros(0, np.uint8), what):
            pass

    def pass_soon(self, rank: int, said: bytes, arrays: Sequence[np.ndarray[Any, Any]]) -> None:
        """Sends arrays to one rank, on a thread, which calls `passed`. They must not change before `flush`.

        Calls of other groups may come before `flush`, unless they have two ranks of this one in common.

        Args:
            rank: the rank.
            said: says what the arrays are: their shapes and dtypes, and whatever the other rank needs; at most 1 MiB.
            arrays: contiguous arrays.
        """
        self._mesh.tell_soon(rank, said)
        for array in arrays:
            self._mesh.send_soon(rank, array)

    def passed(
        self, rank: int, made: Callable[[bytes], Sequence[np.ndarray[Any, Any]]]
    ) -> tuple[bytes, Sequence[np.ndarray[Any, Any]]]:
        """Waits for the next arrays that another rank passes to this one.

        Args:
            rank: the other rank.
            made: returns memory for the arrays, given what the other rank says of them.

        Returns:
            What the other rank says, and the arrays.

        Raises:
            RankLost, RanksDisagree: see the class.
        """
        times, began, waited = self.times, time.perf_counter(), self.times.wait
        said = self._mesh.hear(rank)
        arrays = made(said)
        for array in arrays:
            self._mesh.receive(rank, array)
        times.calls += 1
        times.transfer += time.perf_counter() - began - (times.wait - waited)
        return said, arrays

    def flush(self) -> None:
        """Waits until all arrays of `pass_soon` have been sent. No other call of this group may come before.

        Raises:
            RankLost, RanksDisagree: see the class.
        """
        self._mesh.flush()

    def check(self) -> None:
        """Looks, without waiting, whether a rank has failed. Each call does so too.

        Raises:
            RankLost, RanksDisagree: see the class.
        """
        self._mesh.check()

    def fail(self, error: errors.ShoalError) -> None:
        """Ends the group: all ranks get an error in their calls, also in those in progress. Any thread may call it."""
        self._mesh.fail(error)

    def close(self) -> None:
        """Leaves the group. The other ranks get RankLost when they wait for this one. Further calls have no effect."""
        self._mesh.close()  # first: a thread that waits in shared memory sees that, and leaves it
        self._way.close()
        self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def _call(
        self,
        collective: Collective,
        flat: np.ndarray[Any, Any],
        layout: object,
        op: ReduceOp = ReduceOp.SUM,
        root: int = 0,
    ) -> Iterator[None]:
        """Makes the ranks agree on a call, and measures it with the block, which makes it."""
        call = CollectiveCall(self._calls, collective, flat.dtype.name, flat.size, op, root, layout_of(layout))
        self._calls += 1
        times, began = self.times, time.perf_counter()
        waited = times.wait
        with _tracing.span(collective.value, rank=self.rank, bytes=flat.nbytes):
            self._mesh.agree(call)
            yield
        times.calls += 1
        times.transfer += time.perf_counter() - began - (times.wait - waited)


def _flat(array: np.ndarray[Any, Any], op: ReduceOp) -> np.ndarray[Any, Any]:
    """Returns the array as one dimension, without a copy."""
    kind = array.dtype.kind
    if kind not in "iufcV" or (kind == "V" and array.dtype.name not in {"bfloat16"}):
        raise errors.BadRequest(f"an array of {array.dtype} cannot be reduced; give numbers")
    if op is ReduceOp.MEAN and kind in "iu":
        raise errors.BadRequest(f"the mean of {array.dtype} is not a whole number; give floats, or use ReduceOp.SUM")
    if not (array.flags.c_contiguous and array.flags.writeable):
        raise errors.BadRequest("the array is not contiguous and writable; give np.ascontiguousarray(array), a copy")
    return array.reshape(-1)


__all__ = ["Group"]
