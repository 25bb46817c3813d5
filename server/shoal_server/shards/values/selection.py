"""Selection: the shards that a request names, in the request's order.

Requests that name the same shards share a selection, with values that are computed once for all of them.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from shoal import errors
from shoal._memory.buffers import BufferPool
from shoal._wire import CallLayout, ShardHeaders, Slab
from shoal_server.shards.values.shard import JobShardConfig, Shard, check_slot
from shoal_server.shards.values.stored_shards import Payload, StoredShards

# Selections that a group remembers. Clients name the same shards in each call, so a job has one or two.
_REMEMBERED = 16


class Selection:
    """Some shards of a lock group. Immutable, and shared by the calls that name the same shards.

    Args:
        config: the job's configuration.
        stored: all shards of the job on this server.
        indices: numbers of the shards, in the request's order.
        slots: whether the call moves slots, which have another layout than values.

    Raises:
        BadRequest: no shard is named, or one is named twice.
        UnknownShard: this server does not host them.
        Moved: it hosts only some of them.

    Attributes:
        shards: the shards.
        layout: layout of the call.
        headers: encodes the answers.
        whole: whether these are all shards of the group.
        stored: indexes of the group's slabs that hold their values.
    """

    def __init__(
        self, config: JobShardConfig, stored: StoredShards, indices: Sequence[int], *, slots: bool = False
    ) -> None:
        self._job, self._hosted = config.name, len(stored.by_number)
        self.shards = _named(config.name, stored.by_number, indices)
        self.layout = CallLayout(shard.layout.of_slots if slots else shard.layout for shard in self.shards)
        self.headers = ShardHeaders(indices, config.generation)
        self.whole = len(self.shards) == self._hosted
        self._pieces = [stored.extents(slab) for slab in self.layout.slabs]
        self.stored = sorted({piece.index for pieces in self._pieces for piece in pieces})
        self._sizes = {index: stored.slabs[index].slab.elements for index in self.stored}
        self._in_order = all(
            [(piece.start, piece.stop) for piece in pieces] == [(0, self._sizes[pieces[0].index])]
            for pieces in self._pieces
        )

    def check_whole(self, call: str, term: int = 0) -> None:
        """Checks that these are all shards of the group: a worker has one clock for all of them.

        Args:
            call: what the worker asks for, for the message.
            term: the term of the group.

        Raises:
            Moved: they are not, and the coordinator has taken decisions about the group, so the caller may know another
                grouping.
            BadRequest: they are not, and there was no such decision.
        """
        if self.whole:
            return
        problem = (
            f"a worker's {call} names {len(self.shards)} of the {self._hosted} shards of {self._job} in this lock group"
        )
        if term:
            raise errors.Moved(f"{problem}; fetch the placement again")
        raise errors.BadRequest(f"{problem}; name all of them in one call (only a reader's pull may name some)")

    def gathered(self, stored: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        """Returns the values of the call's slabs. If the request has the group's order, they are not copied.

        Args:
            stored: values of the group's slabs, by index.
        """
        return [
            stored[pieces[0].index][pieces[0].start : pieces[0].stop]
            if len(pieces) == 1
            else np.concatenate([stored[piece.index][piece.start : piece.stop] for piece in pieces])
            for pieces in self._pieces
        ]

    def scatter(self, arrays: Mapping[Slab, np.ndarray], targets: Mapping[int, np.ndarray]) -> None:
        """Copies arrays of the call's slabs to where the group keeps them.

        Args:
            arrays: arrays of some of the call's slabs.
            targets: arrays of the group's slabs, by index.
        """
        for slab, pieces in zip(self.layout.slabs, self._pieces, strict=True):
            first = 0
            for piece in pieces if slab in arrays else ():
                count = piece.stop - piece.start
                targets[piece.index][piece.start : piece.stop] = arrays[slab][first : first + count]
                first += count

    def part(self, payload: Payload, stored: StoredShards, memory: BufferPool) -> Payload:
        """Returns the arrays of a push to the whole group that concern these shards, by slab of the call.

        Args:
            payload: gradients by slab of the group. It is not changed, but its arrays may become those of the part.
            stored: all shards of the group.
            memory: provides memory for copies.
        """
        part: Payload = {}
        for number, pieces in enumerate(self._pieces):
            if pieces[0].index not in payload:  # a push has all slabs of an aggregation, or none
                continue
            if stored.whole(pieces) is not None:
                part[number] = payload[pieces[0].index]
                continue
            dtype = payload[pieces[0].index].dtype
            elements = self.layout.slabs[number].elements
            part[number] = array = memory.take(elements * dtype.itemsize).view(dtype)
            np.concatenate([payload[it.index][it.start : it.stop] for it in pieces], out=array)
        return part

    def payload(self, arrays: Mapping[Slab, np.ndarray], memory: BufferPool) -> Payload:
        """Returns the payload of a push to all shards. If the request has the group's order, nothing is copied.

        Args:
            arrays: arrays of some of the call's slabs.
            memory: provides memory for copies.
        """
        used = [(slab, pieces) for slab, pieces in zip(self.layout.slabs, self._pieces, strict=True) if slab in arrays]
        if self._in_order:
            return {pieces[0].index: arrays[slab] for slab, pieces in used}
        dtypes = {piece.index: arrays[slab].dtype for slab, pieces in used for piece in pieces}
        payload: Payload = {
            index: memory.take(self._sizes[index] * dtype.itemsize).view(dtype) for index, dtype in dtypes.items()
        }
        self.scatter(arrays, payload)
        return payload


class Selections:
    """The selections of one lock group. Any thread may use it, without a lock.

    Args:
        config: the job's configuration.
    """

    def __init__(self, config: JobShardConfig) -> None:
        self._config = config
        self._by_key: dict[tuple[bool, tuple[int, ...]], Selection] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def find(self, stored: StoredShards, indices: Sequence[int], slot: str = "") -> Selection:
        """Returns a selection; the other arguments and errors are those of `Selection`.

        Args:
            stored: all shards of the job on this server.
            indices: numbers of the shards, in the request's order.
            slot: the slot that the call moves; "" means the values.

        Raises:
            BadRequest: the optimizer has no such slot.
        """
        if slot:
            check_slot(self._config, slot)
        key = bool(slot), tuple(indices)
        found = self._by_key.get(key)
        if found is None:
            found = Selection(self._config, stored, key[1], slots=bool(slot))
            if len(self._by_key) >= _REMEMBERED:
                self._by_key = {}
            self._by_key[key] = found
        return found

    def clear(self) -> None:
        """Forgets the selections, because shards were added."""
        self._by_key = {}


def _named(job: str, shards: Mapping[int, Shard], indices: Sequence[int]) -> list[Shard]:
    if not indices or len(set(indices)) != len(indices):
        raise errors.BadRequest(
            f"a request names the shards {list(indices)} of {job}; name at least one, and each only once"
        )
    if missing := [index for index in indices if index not in shards]:
        problem = f"this server does not host shards {missing} of {job}; it has {sorted(shards)}"
        if len(missing) < len(indices):  # the caller may know an earlier grouping
            raise errors.Moved(f"{problem} in this lock group; fetch the placement again")
        raise errors.UnknownShard(problem)
    return [shards[index] for index in indices]
