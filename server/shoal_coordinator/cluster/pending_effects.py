"""Pending effects: those that are not known to be done, and that a restarted coordinator repeats (no I/O)."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from shoal_coordinator.messages import (
    AdmitWorker,
    CreateShards,
    DropCopy,
    DropShards,
    Effect,
    GroupEffect,
    JobRef,
    RemoveWorker,
    ServerRef,
    SetLearningRate,
)


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

    def fenced(self, number: int, committed_steps: int) -> bool:
        """Records that the first half of a removal is done; returns False if the removal was not pending."""
        effect = self._effects.get(number)
        if isinstance(effect, RemoveWorker):
            self._effects[number] = replace(effect, committed_steps=committed_steps)
            self._changed(number)
        return effect is not None

    def end(self, number: int) -> bool:
        """Removes an effect that has ended; returns False if it was not pending."""
        if not self._effects.pop(number, None):
            return False
        self._changed(number)
        return True

    def without_dead(self, effect: Effect, is_alive: Callable[[ServerRef], object]) -> Effect | None:
        """Returns an effect that frees or removes something without dead servers, which have lost their state.

        Waiting for them would delay the effects that follow. But while the shards of a job are being created, a late
        call may still reach the next process of a dead server, so that one keeps its `DropShards`.

        Args:
            effect: the effect. One of another type is returned as it is.
            is_alive: returns whether a server lives.

        Returns:
            The effect for the servers that need it; None if there are none.
        """
        match effect:
            case RemoveWorker() | DropShards():
                stays = isinstance(effect, DropShards) and self._creates(effect.job)
                servers = tuple(it for it in effect.servers if stays or is_alive(it))
                return replace(effect, servers=servers) if servers else None
            case DropCopy() if not is_alive(effect.server):
                return None
        return effect

    def _creates(self, job: JobRef) -> bool:
        """Returns whether the shards of a job are being created."""
        return any(isinstance(it, CreateShards) and it.job == job for it in self)

    def abandon(self, job: JobRef) -> None:
        """Removes all effects of a job whose shards are lost, except `DropShards`."""
        for effect in self:
            if effect.job == job and not isinstance(effect, DropShards):
                self.end(effect.number)

    def take_for(self, job: JobRef, server: str, servers: tuple[ServerRef, ...]) -> list[Effect]:
        """Removes the effects of a job about workers and its learning rate that name a server that is lost to it.

        Args:
            job: the job.
            server: member id of the lost server.
            servers: the servers that have the shards now.

        Returns:
            The same effects for those servers, without numbers. They may have been carried out in part.
        """
        found = [it for it in self if isinstance(it, AdmitWorker | RemoveWorker | SetLearningRate) and it.job == job]
        taken = [it for it in found if any(ref.member == server for ref in it.servers)]
        for effect in taken:
            self.end(effect.number)
        return [replace(effect, servers=servers, number=0) for effect in taken]

    def end_earlier(self, decided: Effect) -> None:
        """Removes the effects about copies that a new effect replaces.

        A decision about a lock group replaces the earlier ones. If the shards of a job are dropped, so are all copies.
        """
        if isinstance(decided, GroupEffect | DropShards):
            group = None if isinstance(decided, DropShards) else decided.group
            ended = GroupEffect if isinstance(decided, GroupEffect) else GroupEffect | DropCopy
            for effect in self:
                if isinstance(effect, ended) and effect.job == decided.job and group in (None, effect.group):
                    self.end(effect.number)

    def group_terms(self, job: JobRef) -> set[tuple[int, int]]:
        """Returns the lock groups of a job, with their terms, about which an effect is pending."""
        return {(it.group, it.term) for it in self if isinstance(it, GroupEffect) and it.job == job}

    def frees(self, job: JobRef, group: int, server: str) -> bool:
        """Returns whether an effect is pending that frees the copy of a lock group on a server.

        Args:
            job: the job.
            group: number of the lock group.
            server: member id of the server.
        """
        found = (it for it in self if isinstance(it, DropCopy) and it.job == job)
        return any((it.group, it.server.member) == (group, server) for it in found)

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        numbers = list(self._effects)
        assert numbers == sorted(numbers)
        assert all(0 < number == effect.number <= self.last for number, effect in self._effects.items())
