"""Pending effects: those that are not known to be done, and that a restarted coordinator repeats (no I/O)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from shoal_coordinator.messages import DropShards, Effect, JobRef, RemoveWorker


class PendingEffects:
    """The pending effects of one cluster, in the order of their numbers, which is that of the decisions.

    Args:
        changed: called with the number of an effect whose record was changed or removed.

    Attributes:
        last: the largest number that was given to an effect.
    """

    def __init__(self, changed: Callable[[int], None] = lambda _: None) -> None:
        self._changed = changed
        self._effects: dict[int, Effect] = {}
        self.last = 0

    def restore(self, effects: Iterable[Effect], last: int) -> None:
        """Restores the pending effects of an earlier coordinator."""
        self._effects = {effect.number: effect for effect in sorted(effects, key=lambda effect: effect.number)}
        self.last = last

    def __iter__(self) -> Iterator[Effect]:
        """Iterates over the pending effects, in order."""
        return iter(list(self._effects.values()))

    def find(self, number: int) -> Effect | None:
        """Returns a pending effect by number."""
        return self._effects.get(number)

    def add(self, effect: Effect) -> Effect:
        """Adds an effect and returns it with its number."""
        self.last += 1
        numbered = self._effects[self.last] = replace(effect, number=self.last)
        self._changed(self.last)
        return numbered

    def fenced(self, number: int, committed_steps: int) -> None:
        """Records that the first half of a removal is done."""
        effect = self._effects.get(number)
        if isinstance(effect, RemoveWorker):
            self._effects[number] = replace(effect, committed_steps=committed_steps)
            self._changed(number)

    def end(self, number: int) -> bool:
        """Removes an effect that has ended; returns False if it was not pending."""
        if not self._effects.pop(number, None):
            return False
        self._changed(number)
        return True

    def abandon(self, job: JobRef) -> None:
        """Removes all effects of a job whose shards are lost, except `DropShards`."""
        for effect in self:
            if effect.job == job and not isinstance(effect, DropShards):
                self.end(effect.number)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        numbers = list(self._effects)
        assert numbers == sorted(numbers)
        assert all(0 < number == effect.number <= self.last for number, effect in self._effects.items())
