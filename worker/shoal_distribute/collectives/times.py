"""Times of the ranks of a group by phase, and the detection of stragglers (no I/O).

Each rank adds up its own times, and tells them to the others with its heartbeats. So every rank can show those of all.
"""

import struct
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from statistics import median

# Heartbeats of a rank that are kept: one a second.
_KEPT = 60
# The straggler waits for less than the others by this share of the time, in so many calls or more.
_NOTICEABLE, _FEWEST = 0.05, 5
_TIMES = struct.Struct("<dQQddd")


@dataclass(slots=True)
class RankTimes:
    """The times of one rank. They overlap with its computation if it reduces gradients during the backward pass.

    Attributes:
        seconds: seconds that passed.
        steps: steps of training in which it has applied gradients.
        calls: collective calls.
        local_reduce: seconds in which the replicas of its process joined their gradients.
        wait: seconds in which it waited until other ranks made the same call.
        transfer: seconds of the rest of the calls: moving and adding data.
    """

    seconds: float = 0.0
    steps: int = 0
    calls: int = 0
    local_reduce: float = 0.0
    wait: float = 0.0
    transfer: float = 0.0

    def encode(self) -> bytes:
        """Returns the bytes that a heartbeat carries."""
        return _TIMES.pack(*astuple(self))

    @classmethod
    def decode(cls, data: bytes) -> "RankTimes":
        """Returns the times that a heartbeat carries.

        Raises:
            struct.error: the bytes are of another kind.
        """
        return cls(*_TIMES.unpack(data))

    def since(self, earlier: "RankTimes") -> "RankTimes":
        """Returns what was added since earlier times of the same rank."""
        return RankTimes(*(now - then for now, then in zip(astuple(self), astuple(earlier), strict=True)))


@dataclass(frozen=True, slots=True)
class StragglerRank:
    """The rank that the others wait for.

    Attributes:
        rank: its number.
        seconds: the median of the others' waits minus its own wait, per call.
    """

    rank: int
    seconds: float

    def __str__(self) -> str:
        return f"rank {self.rank} is a straggler: the others wait {1e3 * self.seconds:.3g} ms for it in each call"


@dataclass(frozen=True, slots=True)
class GroupTimings:
    """The times of all ranks of a group over the last minute, as this rank knows them. `str` makes a table.

    Attributes:
        ranks: the times, by rank.
    """

    ranks: tuple[RankTimes, ...] = ()

    def straggler(self) -> StragglerRank | None:
        """Returns the straggler, or None.

        The straggler is the rank that waits least. Its wait is shorter than the others' median by more than 5% of the
        elapsed time.
        """
        if len(self.ranks) < 2 or min(it.calls for it in self.ranks) < _FEWEST:
            return None
        rank = min(range(len(self.ranks)), key=lambda number: self.ranks[number].wait)
        its = self.ranks[rank]
        longer = median(it.wait for number, it in enumerate(self.ranks) if number != rank) - its.wait
        return StragglerRank(rank, longer / its.calls) if longer > _NOTICEABLE * its.seconds else None

    def __str__(self) -> str:
        rows = ["rank   steps   calls   local reduce       wait   transfer   (seconds of the last minute)"]
        rows += [
            f"{rank:4}{it.steps:8}{it.calls:8}{it.local_reduce:15.3f}{it.wait:11.3f}{it.transfer:11.3f}"
            for rank, it in enumerate(self.ranks)
        ]
        straggler = self.straggler()
        return "\n".join([*rows, *([str(straggler)] if straggler else [])])


class TimesBoard:
    """The times of all ranks of a group. Each attribute is written by one thread at a time.

    Args:
        rank: this rank.
        ranks: number of ranks.
        clock: returns seconds from any origin.

    Attributes:
        own: the times of this rank since its group began. The code that measures a phase adds to it.
    """

    def __init__(self, rank: int, ranks: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.own, self._rank, self._clock, self._began = RankTimes(), rank, clock, clock()
        self._known = [deque([RankTimes()], _KEPT) for _ in range(ranks)]

    def told(self) -> bytes:
        """Returns the times of this rank for a heartbeat, and keeps them."""
        self._known[self._rank].append(self._now())
        return self._known[self._rank][-1].encode()

    def reported(self, rank: int, data: bytes) -> None:
        """Keeps the times of another rank, if its heartbeat has some."""
        if len(data) == _TIMES.size:
            self._known[rank].append(RankTimes.decode(data))

    def timings(self) -> GroupTimings:
        """Returns the times of all ranks."""
        newest: Sequence[RankTimes] = [
            self._now() if rank == self._rank else known[-1] for rank, known in enumerate(self._known)
        ]
        return GroupTimings(tuple(now.since(known[0]) for now, known in zip(newest, self._known, strict=True)))

    def _now(self) -> RankTimes:
        own = self.own
        return RankTimes(self._clock() - self._began, own.steps, own.calls, own.local_reduce, own.wait, own.transfer)


__all__ = ["GroupTimings", "RankTimes", "StragglerRank", "TimesBoard"]
