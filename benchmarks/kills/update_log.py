"""Logs of acknowledged updates, and what of them counts as useful.

A process that trains appends an entry for each acknowledged update: a time, and the number of batches that the model
had at that time. If a system goes back to a checkpoint, this number falls. The interpreters of all systems import this
module, so it needs only the standard library.
"""

import struct
import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_ENTRY = struct.Struct("<dq")
# Settings of the training that all systems share.
COMPUTE_S = 0.1
BATCH = 32
CHECKPOINT_S = 10.0
# Seconds for which the number that a process saw counts if the process adds no entry: longer than any restart takes.
SEEN_S = 30.0
SHAPES = [(256, 256)] * 8  # float32, 2 MiB


class Entry(NamedTuple):
    """One acknowledged update: a time of `time.monotonic`, and the number of batches in the model at that time."""

    at: float
    batches: int


class UpdateLog:
    """The log of one process. A process that was killed and starts again continues its log."""

    def __init__(self, path: str | Path) -> None:
        self._path = path

    def append(self, batches: int, at: float | None = None) -> None:
        """Appends an entry, whose time is now unless it is given."""
        with open(self._path, "ab") as log:
            log.write(_ENTRY.pack(time.monotonic() if at is None else at, batches))


def read(folder: Path) -> list[list[Entry]]:
    """Returns the entries of each log in a folder, by time."""
    return [_entries(path.read_bytes()) for path in sorted(folder.glob("*.updates"))]


def _entries(data: bytes) -> list[Entry]:
    return [Entry(*it) for it in _ENTRY.iter_unpack(data[: len(data) // _ENTRY.size * _ENTRY.size])]


def useful(logs: Sequence[Sequence[Entry]], times: Sequence[float]) -> list[int]:
    """Returns for each time the number of batches that the model had then, and that it never lost later.

    It is the smallest number that the model had at that time or later. The number of batches in the model is the
    largest that a process saw in the last `SEEN_S` seconds: in torchft, a worker that starts again can train a copy of
    its own for some seconds, which the others then replace.

    Args:
        logs: all entries of a run, by process and time.
        times: times that are not later than the last entry.
    """
    entries = sorted((entry.at, entry.batches, place) for place, log in enumerate(logs) for entry in log)
    latest: dict[int, tuple[float, int]] = {}
    least = []
    for at, batches, place in entries:
        latest[place] = at, batches
        least.append(max(seen for since, seen in latest.values() if at - since <= SEEN_S))
    for index in range(len(least) - 2, -1, -1):
        least[index] = min(least[index], least[index + 1])
    stamps = [at for at, _, _ in entries]
    return [least[max(bisect_right(stamps, at) - 1, 0)] for at in times]
