"""Updates of a lock group: carries out what its state machine decides about the values of the shards."""

import time
from collections.abc import Callable, Sequence

from shoal import _tracing
from shoal._memory.buffers import BufferPool
from shoal_server.shards.machine import events
from shoal_server.shards.machine.mode import Apply, Fold
from shoal_server.shards.values.fold_queue import FoldQueue
from shoal_server.shards.values.stored_shards import StoredShards


class Updates:
    """The folds and updates of one lock group.

    Args:
        stored: returns the shards.
        on_apply: called with the seconds that each update took.
        memory: provides memory for copies of the values.

    Attributes:
        on_apply: as given.
        folds: contributions to fold. They are added under the lock of the group. Later they are folded without this
            lock, or by the next update.
    """

    def __init__(
        self, stored: Callable[[], StoredShards], on_apply: Callable[[float], None], memory: BufferPool
    ) -> None:
        self._stored, self.on_apply, self._memory = stored, on_apply, memory
        self.folds = FoldQueue(lambda contribution, expected: stored().fold(contribution, expected))

    def carry_out(self, effects: Sequence[events.LockGroupEffect], version: int) -> None:
        """Queues the folds and applies the updates, in the order of the effects. Called with the lock of the group.

        Args:
            effects: effects of one event.
            version: version of the shards after these effects.
        """
        version -= len([effect for effect in effects if isinstance(effect, Apply)])
        for effect in effects:
            if isinstance(effect, Fold):
                self.folds.add(effect)
            elif isinstance(effect, Apply):
                stored = self._stored()
                with _tracing.span("apply", shards=len(stored.by_number), pushes=len(effect.contributions)):
                    self._apply(stored, effect, version)
                version += 1

    def measure(self) -> tuple[float, ...]:
        """Folds the rest of a sealed step, and returns the squares of its mean; see `StoredShards.measure`."""
        self.folds.work()
        return self._stored().measure()

    def _apply(self, stored: StoredShards, update: Apply, version: int) -> None:
        start = time.perf_counter()
        self.folds.work()
        stored.leave_to_readers(self._memory)
        stored.apply(update, version)
        self.on_apply(time.perf_counter() - start)


__all__ = ["Updates"]
