"""Effects that were decided and are not known to be performed: what a coordinator that comes back has to do. Pure."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from shoal_coordinator.messages import DropShards, Effect, JobRef, RemoveWorker


class PendingEffects:
    """The effects of one cluster, in the order in which they were decided, which is that of their numbers.

    Args:
        changed: told the number of an effect whose record is another one now, or gone.
    """

    def __init__(self, changed: Callable[[int], None] = lambda _: None) -> None:
        self._changed = changed
        self._effects: dict[int, Effect] = {}
        self.last = 0  # the latest number

    def restore(self, effects: Iterable[Effect], last: int) -> None:
        """Takes up what an earlier coordinator has left to do."""
        self._effects = {effect.number: effect for effect in sorted(effects, key=lambda effect: effect.number)}
        self.last = last

    def __iter__(self) -> Iterator[Effect]:
        """Those that are not over, in order."""
        return iter(list(self._effects.values()))

    def find(self, number: int) -> Effect | None:
        """An effect that is not over."""
        return self._effects.get(number)

    def add(self, effect: Effect) -> Effect:
        """Gives an effect its number."""
        self.last += 1
        numbered = self._effects[self.last] = replace(effect, number=self.last)
        self._changed(self.last)
        return numbered

    def fenced(self, number: int, committed_steps: int) -> None:
        """Notes that the first half of a removal is done."""
        effect = self._effects.get(number)
        if isinstance(effect, RemoveWorker):
            self._effects[number] = replace(effect, committed_steps=committed_steps)
            self._changed(number)

    def end(self, number: int) -> bool:
        """Notes that an effect is over; False if it was before, or was given up."""
        if not self._effects.pop(number, None):
            return False
        self._changed(number)
        return True

    def abandon(self, job: JobRef) -> None:
        """Gives up what was to be done with a job's shards, which are lost. Those that are to be dropped still are."""
        for effect in self:
            if effect.job == job and not isinstance(effect, DropShards):
                self.end(effect.number)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        numbers = list(self._effects)
        assert numbers == sorted(numbers)
        assert all(0 < number == effect.number <= self.last for number, effect in self._effects.items())
