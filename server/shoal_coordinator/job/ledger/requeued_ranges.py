"""The requeued ranges of a ledger: those that wait to be leased again, some of them reserved for a rank (no I/O)."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import NamedTuple

from shoal._wire import DataRange
from shoal.v1 import state_pb2
from shoal_coordinator.messages import record_keys

_RANGE = attrgetter("range")


class RequeuedRange(NamedTuple):
    """A range that waits to be leased again."""

    range: DataRange
    preferred_rank: int | None = None  # the rank that it is reserved for; None: any rank

    def within(self, workers: int) -> "RequeuedRange":
        """Returns this range for a job with ranks below `workers`: no other rank is preferred."""
        is_reserved = self.preferred_rank is not None and self.preferred_rank < workers
        return self if is_reserved else RequeuedRange(self.range)

    def to_proto(self) -> state_pb2.RequeuedRange:
        """Returns the record of this range."""
        part = self.range
        return state_pb2.RequeuedRange(
            epoch=part.epoch, start=part.start, stop=part.stop, preferred_rank=self.preferred_rank
        )

    @classmethod
    def from_proto(cls, message: state_pb2.RequeuedRange) -> "RequeuedRange":
        """Returns the range in a record."""
        preferred_rank = message.preferred_rank if message.HasField("preferred_rank") else None
        return cls(DataRange.from_proto(message), preferred_rank)


class RequeuedRanges:
    """Requeued ranges, in order. No two of them overlap.

    Args:
        changed: called with the name of the record of each range that is added or removed from now on.
        ranges: the first ranges.
    """

    def __init__(self, changed: Callable[[str], None], ranges: Iterable[RequeuedRange] = ()) -> None:
        self._changed = changed
        self._ranges = sorted(ranges, key=_RANGE)

    def __iter__(self) -> Iterator[RequeuedRange]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, part: DataRange, preferred_rank: int | None) -> None:
        """Adds a range, reserved for a rank unless `preferred_rank` is None."""
        insort(self._ranges, RequeuedRange(part, preferred_rank), key=_RANGE)
        self._changed(_name(part))

    def take(self, suits: Callable[[int | None], bool]) -> DataRange | None:
        """Removes and returns the earliest range whose preferred rank satisfies `suits`."""
        for place, part in enumerate(self._ranges):
            if suits(part.preferred_rank):
                self._changed(_name(part.range))
                return self._ranges.pop(place).range
        return None

    @property
    def record_names(self) -> Iterator[str]:
        """The names of the records of all ranges."""
        return (_name(part.range) for part in self._ranges)

    def record(self, epoch: int, start: int) -> state_pb2.RequeuedRange | None:
        """Returns the record of the range that begins there; None if there is none."""
        place = bisect_left(self._ranges, (epoch, start), key=lambda part: (part.range.epoch, part.range.start))
        found = self._ranges[place] if place < len(self._ranges) else None
        return found.to_proto() if found and (found.range.epoch, found.range.start) == (epoch, start) else None


def _name(part: DataRange) -> str:
    return record_keys.of_requeued(part.epoch, part.start)


__all__ = ["RequeuedRange", "RequeuedRanges"]
