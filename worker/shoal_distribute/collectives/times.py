"""Times of the ranks of a group: each rank adds up its own, and tells them to the others with its heartbeats (no I/O).

So every rank can show those of all.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

from google.protobuf.message import DecodeError

from shoal.status import GroupTimings, RankTimes
from shoal.v1 import group_pb2

# Heartbeats of a rank that are kept: one a second.
_KEPT, _INTERVAL_S = 60, 1.0


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
        return self._known[self._rank][-1].to_proto().SerializeToString()

    def keep(self) -> None:
        """Keeps the times of this rank once a second: those of a process without a group, which has no heartbeats."""
        known, now = self._known[self._rank], self._now()
        if now.seconds - known[-1].seconds < _INTERVAL_S:
            return
        known.append(now)
        while now.seconds - known[0].seconds > _KEPT * _INTERVAL_S and len(known) > 1:
            known.popleft()

    def reported(self, rank: int, data: bytes) -> None:
        """Keeps the times of another rank, if its heartbeat has some."""
        with contextlib.suppress(DecodeError):  # of another version
            if data:
                self._known[rank].append(RankTimes.from_proto(group_pb2.RankTimes.FromString(data)))

    def timings(self) -> GroupTimings:
        """Returns the times of all ranks."""
        newest: Sequence[RankTimes] = [
            self._now() if rank == self._rank else known[-1] for rank, known in enumerate(self._known)
        ]
        return GroupTimings(tuple(now.since(known[0]) for now, known in zip(newest, self._known, strict=True)))

    def _now(self) -> RankTimes:
        own = self.own
        return replace(own, seconds=self._clock() - self._began)


__all__ = ["GroupTimings", "RankTimes", "TimesBoard"]
