"""The generations of one group of ranks, as a state machine without I/O.

A generation has a fixed list of ranks. It ends when a rank is lost, when one of its processes joins again, or when a
new process finds it smaller than the group may be. The next one is formed when all other processes of the last one are
there again, or are silent. So the survivors of a failure do not wait for the process that failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Seconds without a call after which a process counts as lost. Ranks send one a second.
SILENT_S = 7.0


@dataclass(frozen=True, slots=True)
class RankCandidate:
    """A process that joins a group.

    Attributes:
        member: its random name.
        address: host:port at which it waits for the other ranks.
        progress: how far it has trained; -1 if it has nothing that others could use.
    """

    member: str
    address: str
    progress: int = -1


@dataclass(frozen=True, slots=True)
class RankGeneration:
    """A generation.

    Attributes:
        generation: its number, from 1.
        ranks: its processes, by rank.
    """

    generation: int
    ranks: tuple[RankCandidate, ...]


@dataclass(frozen=True, slots=True)
class RankBeat:
    """What a rank says about its generation.

    Attributes:
        candidate: the process.
        generation: its generation.
        rank: its rank.
        size: number of ranks of the generation.
        lost_rank: a rank that it has lost; -1 for none.
        reason: why the generation ends; empty if it knows no reason.
        leaves: whether it leaves the group.
    """

    candidate: RankCandidate
    generation: int
    rank: int
    size: int
    lost_rank: int = -1
    reason: str = ""
    leaves: bool = False


class RankGroup:
    """One group.

    Args:
        ranks: number of ranks of the first generation, and the most of a later one.
        least: the fewest ranks of a later generation.
        owner: name of the user who has made it.

    Attributes:
        ranks: the same.
        owner: the same.
        generation: number of the last generation; 0 before the first one.
    """

    def __init__(self, ranks: int, least: int, owner: str = "") -> None:
        self.ranks, self.owner, self.generation = ranks, owner, 0
        self._least = least
        self._size = 0  # of the current generation
        self._seats: dict[
            int, RankCandidate
        ] = {}  # its ranks; after a restart, those that have called, without those left
        self._ended = "it has not begun"  # why the current generation has ended; empty while it goes on
        self._waiting: dict[str, RankCandidate] = {}  # by member, in the order in which they came
        self._last_call_at: dict[str, float] = {}  # when each process has last called
        self._expected: set[str] = set()  # processes that the next generation waits for
        self._learns_until = 0.0  # after a restart: until then, others may call that this group does not know

    @property
    def is_empty(self) -> bool:
        """Whether nobody is in it and nobody waits, so that it can be forgotten."""
        return not self._last_call_at

    @property
    def waiting(self) -> Mapping[str, RankCandidate]:
        """The processes that wait for the next generation, by member."""
        return self._waiting

    @property
    def waits_for(self) -> str:
        """What the next generation waits for, for people."""
        if not self._ended:
            return f"a free place: generation {self.generation} has all of its {self.ranks} ranks"
        if self.generation == 0:
            return f"{self.ranks - len(self._waiting)} more of {self.ranks} processes"
        missing = [
            f"rank {rank} ({it.address})" for rank, it in sorted(self._seats.items()) if it.member in self._expected
        ]
        return ", ".join(missing[:5]) or f"{self._least} processes or more"

    def join(self, now: float, candidate: RankCandidate, generation: int = 0) -> RankGeneration | None:
        """Gives a process a place in the next generation.

        Args:
            now: seconds of a clock that does not go back.
            candidate: the process.
            generation: the last generation that it has belonged to; 0 for none.

        Returns:
            The generation, if the process is in it already; else None: it has to call again.
        """
        self.expire(now)
        self._last_call_at[candidate.member] = now
        if not self._ended and candidate in self._seats.values():
            return self._formed()
        if not self._ended:
            rank = self._rank_of(candidate.member)
            if rank is not None:
                self._end(f"rank {rank} of {self._size} has left it, and joins again", candidate.member)
            elif len(self._seats) < self.ranks:
                self._end("another process joins")
        if generation > self.generation:
            self._restarted(now, generation)
        self._expected.discard(candidate.member)
        self._waiting[candidate.member] = candidate
        self._form(now)
        return self._formed() if not self._ended and candidate in self._seats.values() else None

    def beat(self, now: float, beat: RankBeat) -> str:
        """Records what a rank says.

        Args:
            now: as for `join`.
            beat: what it says.

        Returns:
            Why its generation has ended; empty if it goes on.
        """
        self.expire(now)
        member = beat.candidate.member
        if beat.generation > self.generation:
            self._restarted(now, beat.generation)
            self._size, self._ended = beat.size, ""
        if beat.generation == self.generation and beat.rank < self._size and now < self._learns_until:
            self._seats.setdefault(beat.rank, beat.candidate)
        if beat.leaves:
            self._forget(member)
            return "it has left"
        self._last_call_at[member] = now
        seat = self._seats.get(beat.rank)
        if beat.generation != self.generation or seat is None or seat.member != member:
            return f"generation {self.generation} of the group has begun without it"
        if beat.reason and not self._ended:
            lost = self._seats.get(beat.lost_rank)
            self._end(beat.reason, lost.member if lost else "")
        return self._ended

    def _restarted(self, now: float, generation: int) -> None:
        """Takes over the number of a generation that was formed before the coordinator's restart."""
        self.generation, self._learns_until = generation, now + SILENT_S
        self._seats, self._size, self._ended = {}, 0, "the coordinator has restarted"
        self._expected.clear()

    def _end(self, why: str, lost: str = "") -> None:
        self._ended = why
        self._expected = {it.member for it in self._seats.values()} - {lost} - self._waiting.keys()

    def expire(self, now: float) -> None:
        """Ends the generation if one of its processes is silent, and forgets silent processes."""
        for member in [member for member, at in self._last_call_at.items() if now - at > SILENT_S]:
            silent_s = now - self._last_call_at[member]
            rank = self._rank_of(member)
            if rank is not None and not self._ended:
                self._end(f"rank {rank} of {self._size} has told the coordinator nothing for {silent_s:.0f} s", member)
            self._waiting.pop(member, None)
            self._expected.discard(member)
            del self._last_call_at[member]

    def _forget(self, member: str) -> None:
        rank = self._rank_of(member)
        if rank is not None:
            del self._seats[rank]
        self._waiting.pop(member, None)
        self._expected.discard(member)
        self._last_call_at.pop(member, None)

    def _form(self, now: float) -> None:
        """Forms the next generation if it is complete."""
        if self.generation == 0:
            complete = len(self._waiting) >= self.ranks
        else:
            others = not self._expected and now >= self._learns_until
            complete = others and len(self._waiting) >= min(self._least, self.ranks)
        if not (self._ended and complete):
            return
        ranks = {it.member: rank for rank, it in self._seats.items()}
        ordered = sorted(self._waiting.values(), key=lambda it: ranks.get(it.member, self.ranks))  # stable
        chosen = ordered[: self.ranks]
        self._seats, self._size = dict(enumerate(chosen)), len(chosen)
        self.generation, self._ended, self._learns_until = self.generation + 1, "", 0.0
        for it in chosen:
            del self._waiting[it.member]

    def _formed(self) -> RankGeneration:
        return RankGeneration(self.generation, tuple(it for _, it in sorted(self._seats.items())))

    def _rank_of(self, member: str) -> int | None:
        return next((rank for rank, it in self._seats.items() if it.member == member), None)


__all__ = ["SILENT_S", "RankBeat", "RankCandidate", "RankGeneration", "RankGroup"]
