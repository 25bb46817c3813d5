"""Updates of a lock group: carries out what its state machine decides about the values of the shards."""

import time
from collections.abc import Callable, Sequence

from shoal import _tracing
from shoal._memory.buffers import BufferPool
from shoal_server.shards import events
from shoal_server.shards.fold_queue import FoldQueue
from shoal_server.shards.mode import Apply, Contribution, Fold
from shoal_server.shards.shard import Shard


class Updates:
    """The folds and updates of one lock group.

    Args:
        shards: returns the shards.
        on_apply: called with the seconds that each update took.
        memory: provides memory for copies of the values.

    Attributes:
        folds: contributions to fold. They are added under the lock of the group. Later they are folded without this
            lock, or by the next update.
    """

    def __init__(
        self, shards: Callable[[], Sequence[Shard]], on_apply: Callable[[float], None], memory: BufferPool
    ) -> None:
        self._shards, self._on_apply, self._memory = shards, on_apply, memory
        self.folds = FoldQueue(self._fold)

    def carry_out(self, effects: Sequence[events.Effect], version: int) -> None:
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
                shards = self._shards()
                with _tracing.span("apply", shards=len(shards), pushes=len(effect.contributions)):
                    self._apply(shards, effect, version)
                version += 1

    def _apply(self, shards: Sequence[Shard], update: Apply, version: int) -> None:
        start = time.perf_counter()
        self.folds.work()
        for shard in shards:
            shard.leave_to_readers(self._memory)
            shard.apply(update, version)
        self._on_apply(time.perf_counter() - start)

    def _fold(self, contribution: Contribution, expected: int) -> None:
        for shard in self._shards():
            shard.fold(contribution, expected)


__all__ = ["Updates"]
