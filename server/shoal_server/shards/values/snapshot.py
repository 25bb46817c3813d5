"""Snapshot of a slab: its values at one version, copied only when an update is about to change them."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from shoal._wire import ShardLayout
from shoal_server.shards.machine.events import AnswerCut


class Snapshot:
    """A slab's values at one version, for any number of concurrent readers.

    It shares the slab's memory. Before an update, the slab checks `in_use`; if there are readers, it leaves the
    memory to them and continues with a copy. Consequences:

    - In synchronous training, updates happen between pulls, so nothing is copied.
    - A large variable is sent without a second copy in memory.
    - A slow reader does not delay updates.

    Args:
        version: updates applied.
        values: the flat values, in the dtype that the server keeps.
        slots: the slots by name; read only by savers.
        counting: guards the counts of readers; the snapshots of a lock group share it.

    Attributes:
        version, values, slots: as given; valid while the snapshot is in use.
        readers: number of readers, including the savers. Guarded by `counting`.
        savers: number of readers that also read slots. Guarded by `counting`.
    """

    def __init__(
        self,
        version: int,
        values: np.ndarray,
        slots: Mapping[str, np.ndarray],
        counting: threading.Lock,
    ) -> None:
        self.version, self.values, self.slots = version, values, slots
        # Taken alone or after the group's lock, and no lock is taken under it.
        self._counting = counting
        self.readers = 0
        self.savers = 0

    def array(self, slot: str) -> np.ndarray:
        """Returns a slot, or the values for "" and if the slab has no slots."""
        return self.slots[slot] if slot and self.slots else self.values

    def begin_saving(self) -> None:
        """Adds a reader that also reads slots, until `end_saving`. Called with the lock of the group."""
        with self._counting:
            self.readers += 1
            self.savers += 1

    def end_saving(self) -> None:
        """Ends one `begin_saving`."""
        with self._counting:
            self.readers -= 1
            self.savers -= 1

    @property
    def in_use(self) -> bool:
        """Whether there are readers."""
        with self._counting:
            return self.readers > 0

    @property
    def being_saved(self) -> bool:
        """Whether a reader also reads the slots."""
        with self._counting:
            return self.savers > 0


class ShardSnapshot:
    """The values and slots of one shard while they are being saved. The owner must call `end_saving`.

    Args:
        layout: layout of the shard.
        parts: for each arena, a snapshot of its slab, and the slab's element at which it starts.

    Attributes:
        layout: as given.
    """

    def __init__(self, layout: ShardLayout, parts: Sequence[tuple[Snapshot, int]]) -> None:
        self.layout = layout
        self._parts = [
            (snapshot, slice(start, start + arena.elements))
            for arena, (snapshot, start) in zip(layout.arenas, parts, strict=True)
        ]
        for snapshot, _ in self._parts:
            snapshot.begin_saving()

    @property
    def version(self) -> int:
        """Updates applied."""
        return self._parts[0][0].version

    @property
    def in_use(self) -> bool:
        """Whether later updates must leave the memory as it is."""
        return any(snapshot.in_use for snapshot, _ in self._parts)

    @property
    def values(self) -> list[np.ndarray]:
        """Flat values of each arena, as the server keeps them."""
        return [snapshot.values[elements] for snapshot, elements in self._parts]

    @property
    def slots(self) -> list[dict[str, np.ndarray]]:
        """Flat slots of each arena, by name."""
        return [{name: slot[elements] for name, slot in snapshot.slots.items()} for snapshot, elements in self._parts]

    def end_saving(self) -> None:
        """Lets later updates change the memory."""
        for snapshot, _ in self._parts:
            snapshot.end_saving()


@dataclass(frozen=True, slots=True)
class Cut:
    """The state of a group's shards for a checkpoint. The owner must end each snapshot with `end_saving`."""

    answer: AnswerCut
    snapshots: Sequence[ShardSnapshot]
