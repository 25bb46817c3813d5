"""Quarantines of one job: workers that fail again and again, or hang, and so get no assignment for a while (no I/O)."""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.v1 import state_pb2

# Seconds of a worker's first quarantine in a job, doubled each time, up to the maximum.
_QUARANTINE_S, _MAX_QUARANTINE_S = 60.0, 3600.0
_DOUBLED = 6  # doublings until the maximum is reached
# Hangs of a worker in one job after which it is quarantined, as after so many deaths of its trainer in a row.
HANGS = 3
# Maximum number of quarantined workers that a status names.
_MAX_NAMED = 10


@dataclass(slots=True)
class _Quarantine:
    """The quarantines of one worker in one job, after its failures there.

    Attributes:
        count: number of its quarantines.
        until: end of the latest one, in seconds of Unix time.
    """

    count: int = 0
    until: float = 0.0


class Quarantines:
    """The quarantines of one job. Its length is the number of workers that may be quarantined now; see `end`."""

    def __init__(self) -> None:
        self._quarantines: dict[str, _Quarantine] = {}  # by worker, earlier workers included
        self._in_force: set[str] = set()  # workers whose latest quarantine `end` has not ended
        self._hangs: Counter[str] = Counter()  # by worker; not stored, so a restart of the coordinator clears it

    def __len__(self) -> int:
        return len(self._in_force)

    def add(self, worker: str, now: float) -> float:
        """Quarantines a worker, longer each time; returns the seconds."""
        found = self._quarantines.setdefault(worker, _Quarantine())
        seconds = min(_QUARANTINE_S * 2.0 ** min(found.count, _DOUBLED), _MAX_QUARANTINE_S)
        found.count, found.until = found.count + 1, now + seconds
        self._in_force.add(worker)
        self._hangs.pop(worker, None)
        return seconds

    def end(self, now: float) -> bool:
        """Ends the quarantines that are over; returns whether there were any. Their workers can get assignments."""
        over = {worker for worker in self._in_force if now >= self._quarantines[worker].until}
        self._in_force -= over
        return bool(over)

    def note(self, now: float) -> str:
        """Returns which workers are quarantined and until when, for users; empty if none are."""
        in_force = sorted((worker, self._quarantines[worker].until) for worker in self._in_force)
        ends = {worker: time.gmtime(until) for worker, until in in_force if now < until}
        found = [f"worker {worker} until {time.strftime('%H:%M:%S UTC', end)}" for worker, end in ends.items()]
        left = len(found) - _MAX_NAMED
        return f"quarantined: {', '.join(found[:_MAX_NAMED])}{f' and {left} more' if left > 0 else ''}" if found else ""

    def has(self, worker: str, now: float) -> bool:
        """Returns whether a worker must not get an assignment now."""
        found = self._quarantines.get(worker)
        return found is not None and now < found.until

    def count_hang(self, worker: str) -> bool:
        """Counts a hang of a worker; returns whether there were so many that it should be quarantined."""
        self._hangs[worker] += 1
        return self._hangs[worker] >= HANGS

    def to_proto(self) -> list[state_pb2.QuarantineRecord]:
        """Returns the records of the quarantines."""
        found = sorted(self._quarantines.items())
        return [state_pb2.QuarantineRecord(worker=worker, count=it.count, until=it.until) for worker, it in found]

    def restore_from(self, records: Iterable[state_pb2.QuarantineRecord], now: float) -> None:
        """Restores the quarantines. Each ends no later than if it began now."""
        self._quarantines = {it.worker: _Quarantine(it.count, min(it.until, now + _MAX_QUARANTINE_S)) for it in records}
        self._in_force = set(self._quarantines)
