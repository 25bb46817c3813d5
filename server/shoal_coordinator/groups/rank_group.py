"""The generations of one group of ranks, as a state machine without I/O.

A generation has a fixed list of ranks. It ends when a rank is lost, when one of its processes joins again, or when a
new process finds it smaller than the group may be. The next one is formed when all other processes of the last one are
there again, or are silent. So the survivors of a failure do not wait for the process that failed.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.status import GroupStatus, GroupTimings, RankStatus, RankTimes

# Seconds without a call after which a process counts as lost. Ranks send one a second.
SILENT_S = 7.0


@dataclass(frozen=True, slots=True)
class RankCandidate:
    """A process that joins a group.

    Attributes:
        process_id: a random text that the process draws and keeps.
        address: host:port at which it waits for the other ranks.
        progress: how far it has trained; -1 if it has nothing that others could use.
    """

    process_id: str
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
class RankHeartbeat:
    """What a rank says about its generation.

    Attributes:
        candidate: the process.
        generation: its generation.
        rank: its rank.
        size: number of ranks of the generation.
        lost_rank: a rank that it has lost; -1 for none.
        reason: why the generation ends; empty if it knows no reason.
        leaves: whether it leaves the group.
        times: its times over the last minute; None if it has none yet.
    """

    candidate: RankCandidate
    generation: int
    rank: int
    size: int
    lost_rank: int = -1
    reason: str = ""
    leaves: bool = False
    times: RankTimes | None = None


class RankGroup:
    """One group.

    Args:
        ranks: number of ranks of the first generation, and the largest number of later ones.
        min_ranks: the smallest number of ranks of a later generation.
        submitter: name of the user who has made it; empty if it is not known.

    Attributes:
        ranks: number of ranks of the first generation, and the largest number of later ones.
        min_ranks: the smallest number of ranks of a later generation.
        submitter: name of the user who has made it; empty if it is not known.
        generation: number of the last generation; 0 before the first one.
    """

    def __init__(self, ranks: int, min_ranks: int, submitter: str = "") -> None:
        self.ranks, self.min_ranks, self.submitter, self.generation = ranks, min_ranks, submitter, 0
        self._size = 0  # of the current generation
        # Its ranks, without those that have left. After a restart, only those that have called.
        self._seats: dict[int, RankCandidate] = {}
        self._times: dict[int, RankTimes] = {}  # of ranks in `_seats`, as their last heartbeats have told them
        self._ended = "it has not begun"  # why the current generation has ended; empty while it goes on
        self._waiting: dict[str, RankCandidate] = {}  # by process id, in the order in which they came
        self._last_call_at: dict[str, float] = {}  # when each process has last called
        self._expected: set[str] = set()  # processes that the next generation waits for
        self._learns_until = 0.0  # after a restart: until then, others may call that this group does not know

    @property
    def is_empty(self) -> bool:
        """Whether nobody is in it and nobody waits, so that it can be forgotten."""
        return not self._last_call_at

    @property
    def size(self) -> int:
        """The number of ranks of the last generation that have not left it."""
        return len(self._seats)

    @property
    def waiting(self) -> Mapping[str, RankCandidate]:
        """The processes that wait for the next generation, by process id."""
        return self._waiting

    @property
    def waits_for(self) -> str:
        """What the next generation waits for, as text."""
        if not self._ended:
            return f"a free place: generation {self.generation} has all of its {self.ranks} ranks"
        if self.generation == 0:
            return f"{self.ranks - len(self._waiting)} more of {self.ranks} processes"
        missing = [
            f"rank {rank} ({it.address})" for rank, it in sorted(self._seats.items()) if it.process_id in self._expected
        ]
        return ", ".join(missing[:5]) or f"{self.min_ranks} processes or more"

    def status(self, name: str, *, members: bool) -> GroupStatus:
        """Returns the status of this group.

        Args:
            name: its name.
            members: whether to include the ranks.
        """
        times = [self._times.get(rank, RankTimes()) for rank in range(self._size)]
        return GroupStatus(
            name,
            submitter=self.submitter,
            generation=self.generation,
            size=self.size,
            ranks=self.ranks,
            min_ranks=self.min_ranks,
            waits_for=self.waits_for if self._ended else "",
            straggler=None if self._ended else GroupTimings(tuple(times)).straggler(),
            members=tuple(
                RankStatus(rank, it.address, times[rank]) for rank, it in sorted(self._seats.items()) if members
            ),
        )

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
        self._last_call_at[candidate.process_id] = now
        if not self._ended and candidate in self._seats.values():
            return self._formed()
        if not self._ended:
            rank = self._rank_of(candidate.process_id)
            if rank is not None:
                self._end(f"rank {rank} of {self._size} has left it, and joins again", candidate.process_id)
            elif len(self._seats) < self.ranks and now >= self._learns_until:
                self._end("another process joins")
        if generation > self.generation:
            self._restarted(now, generation)
        self._expected.discard(candidate.process_id)
        self._waiting[candidate.process_id] = candidate
        self._form(now)
        return self._formed() if not self._ended and candidate in self._seats.values() else None

    def heartbeat(self, now: float, heartbeat: RankHeartbeat) -> str:
        """Records what a rank says.

        Args:
            now: as for `join`.
            heartbeat: what it says.

        Returns:
            Why its generation has ended; empty if it goes on.
        """
        self.expire(now)
        process_id = heartbeat.candidate.process_id
        if heartbeat.generation > self.generation:
            self._restarted(now, heartbeat.generation)
            self._size, self._ended = heartbeat.size, ""
        if heartbeat.generation == self.generation and heartbeat.rank < self._size and now < self._learns_until:
            self._seats.setdefault(heartbeat.rank, heartbeat.candidate)
        if heartbeat.leaves:
            self._forget(process_id)
            return "it has left"
        self._last_call_at[process_id] = now
        seat = self._seats.get(heartbeat.rank)
        if heartbeat.generation != self.generation or seat is None or seat.process_id != process_id:
            return f"generation {self.generation} of the group has begun without it"
        if heartbeat.times:
            self._times[heartbeat.rank] = heartbeat.times
        if heartbeat.reason and not self._ended:
            lost = self._seats.get(heartbeat.lost_rank)
            self._end(heartbeat.reason, lost.process_id if lost else "")
        return self._ended

    def _restarted(self, now: float, generation: int) -> None:
        """Takes over the number of a generation that was formed before the coordinator's restart."""
        self.generation, self._learns_until = generation, now + SILENT_S
        self._seats, self._size, self._ended = {}, 0, "the coordinator has restarted"
        self._times.clear()
        self._expected.clear()

    def _end(self, why: str, lost: str = "") -> None:
        self._ended = why
        self._expected = {it.process_id for it in self._seats.values()} - {lost} - self._waiting.keys()

    def expire(self, now: float) -> None:
        """Ends the generation if one of its processes is silent, and forgets silent processes."""
        for process_id in [process_id for process_id, at in self._last_call_at.items() if now - at > SILENT_S]:
            silent_s = now - self._last_call_at[process_id]
            rank = self._rank_of(process_id)
            if rank is not None and not self._ended:
                self._end(
                    f"rank {rank} of {self._size} has told the coordinator nothing for {silent_s:.0f} s", process_id
                )
            self._waiting.pop(process_id, None)
            self._expected.discard(process_id)
            del self._last_call_at[process_id]

    def _forget(self, process_id: str) -> None:
        rank = self._rank_of(process_id)
        if rank is not None:
            del self._seats[rank]
            self._times.pop(rank, None)
        self._waiting.pop(process_id, None)
        self._expected.discard(process_id)
        self._last_call_at.pop(process_id, None)

    def _form(self, now: float) -> None:
        """Forms the next generation if it is complete."""
        if self.generation == 0:
            complete = len(self._waiting) >= self.ranks
        else:
            others = not self._expected and now >= self._learns_until
            complete = others and len(self._waiting) >= min(self.min_ranks, self.ranks)
        if not (self._ended and complete):
            return
        ranks = {it.process_id: rank for rank, it in self._seats.items()}
        ordered = sorted(self._waiting.values(), key=lambda it: ranks.get(it.process_id, self.ranks))  # stable
        chosen = ordered[: self.ranks]
        self._seats, self._size = dict(enumerate(chosen)), len(chosen)
        self._times.clear()
        self.generation, self._ended, self._learns_until = self.generation + 1, "", 0.0
        for it in chosen:
            del self._waiting[it.process_id]

    def _formed(self) -> RankGeneration:
        return RankGeneration(self.generation, tuple(it for _, it in sorted(self._seats.items())))

    def _rank_of(self, process_id: str) -> int | None:
        return next((rank for rank, it in self._seats.items() if it.process_id == process_id), None)


__all__ = ["SILENT_S", "RankCandidate", "RankGeneration", "RankGroup", "RankHeartbeat"]
