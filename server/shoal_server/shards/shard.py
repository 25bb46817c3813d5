"""Shard: slices of variables with their arenas and their current snapshot; the unit of placement."""

import threading
from collections.abc import MutableMapping
from dataclasses import dataclass

import numpy as np

from shoal import consistency, errors, optim
from shoal._memory.buffers import BufferPool
from shoal._wire import ArenaKey, ShardLayout
from shoal.variables import Variable
from shoal_server.shards.arena import Arena
from shoal_server.shards.mode import Apply, Contribution
from shoal_server.shards.snapshot import Snapshot

# The gradients or values of a push, by arena: finite, in the dtype that the server keeps. A shard that has taken its
# arrays removes them, so that nothing else keeps their memory.
Payload = MutableMapping[ArenaKey, np.ndarray]


@dataclass(frozen=True, slots=True)
class JobShardConfig:
    """The configuration that all shards of a job share."""

    name: str
    generation: int
    variables: dict[str, Variable]
    optimizer: optim.Optimizer
    consistency: consistency.Consistency
    seed: int


@dataclass(frozen=True, slots=True)
class Stamp:
    """The permanent name of a push within its job."""

    worker: str
    incarnation: int
    step: int


class Shard:
    """Slices of variables that are placed and saved together. The lock of its group guards it.

    Args:
        config: the job's configuration.
        layout: the shard's layout.
        counting: guards the numbers of readers of this shard's snapshots; the shards of a group share it.
    """

    def __init__(self, config: JobShardConfig, layout: ShardLayout, counting: threading.Lock) -> None:
        self.layout = layout
        self.generation = config.generation
        self.arenas = [Arena(arena, config.variables, config.optimizer, config.seed) for arena in layout.arenas]
        self._keys = [(layout.shard, index) for index in range(len(layout.arenas))]
        self._name = f"{config.name}/{layout.shard}"
        self._counting = counting
        # Of the arenas' current values, once a reader has asked for it.
        self._snapshot: Snapshot | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of values and slots."""
        return sum(arena.nbytes for arena in self.arenas)

    def latest(self, version: int) -> Snapshot:
        """Returns the snapshot of the current values. The caller begins to use it before it releases the lock.

        Args:
            version: number of updates in the values.
        """
        if self._snapshot is None:
            values, slots = [arena.values for arena in self.arenas], [arena.slots for arena in self.arenas]
            self._snapshot = Snapshot(version, self.layout, values, slots, self._counting)
        return self._snapshot

    def leave_to_readers(self, memory: BufferPool) -> None:
        """Moves the arenas to new memory if readers use the current one. Called before the values change."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot and snapshot.in_use:
            saved = snapshot.being_saved
            for arena in self.arenas:
                arena.move(memory, slots=saved)

    def fold(self, contribution: Contribution, expected: int) -> None:
        """Adds a contribution to the running sums, and drops its gradients.

        Args:
            contribution: the contribution; its payload loses the arenas of this shard.
            expected: number of contributions to the step, as far as known.
        """
        for key, arena in zip(self._keys, self.arenas, strict=True):
            array = contribution.payload.pop(key, None)
            if array is not None:
                arena.fold(array, contribution.weight, expected)

    def apply(self, update: Apply, version: int) -> None:
        """Applies one update to each arena for which a contribution has values.

        Args:
            update: the contributions, in order of rank. Those after the first `folded` ones lose their gradients.
            version: updates applied before this one.
        """
        rest = update.contributions[update.folded :]
        for key, arena in zip(self._keys, self.arenas, strict=True):
            parts = [part for part in rest if key in part.payload]
            if parts or arena.folded:
                arena.apply(
                    [part.payload.pop(key) for part in parts],
                    [part.weight for part in parts],
                    version=version,
                    scale=update.learning_rate_scale,
                    expected=update.expected,
                )

    def non_finite(self, index: int, element: int, value: float) -> errors.NonFiniteGradient:
        """Returns the error for a push whose arena holds NaN or Inf.

        Args:
            index: index of the arena.
            element: index of the element in the arena.
            value: the element.
        """
        arena = self.layout.arenas[index]
        name = next(part.variable for part in reversed(arena.slices) if part.offset <= element)
        return errors.NonFiniteGradient(
            f"{self._name}: the push for {name!r} contains {value}; the whole push was rejected and "
            "no variable changed. Check for a learning rate that is too large or a division by zero, or skip this step",
            variable=name,
        )
