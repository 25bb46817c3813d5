"""Conditions of a network link, and the arrival times of segments under them (no I/O, no clock).

A segment is what one read of a socket returns. It is not a packet: several small messages may be in one segment.
"""

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass


class Direction(enum.Enum):
    """Directions of a connection, as seen from the process that opened it."""

    REQUESTS = "requests"  # from the process that opened the connection
    REPLIES = "replies"  # to that process


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a link, the same for both directions of each connection.

    Attributes:
        delay_s: seconds that a segment takes on average.
        jitter_s: the longest deviation from this time, in seconds. Segments keep their order nevertheless.
        stall_share: the share of segments that take `stall_s` seconds longer.
        stall_s: seconds of such a stall.
        bytes_per_s: the rate of each direction of a connection; 0 means no limit.
        drop_share: the share of replies that are lost together with their connection.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    stall_share: float = 0.0
    stall_s: float = 0.0
    bytes_per_s: float = 0.0
    drop_share: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.jitter_s <= self.delay_s, "a segment would arrive before it was sent"
        assert 0 <= self.stall_share <= 1, "stall_share is a share"
        assert 0 <= self.drop_share <= 1, "drop_share is a share"
        assert min(self.stall_s, self.bytes_per_s) >= 0


class Line:
    """One direction of a connection: says when its segments arrive.

    Args:
        chance: the source of randomness, which the lines of a proxy share.
        on_stall: called for each segment that is stalled.
    """

    def __init__(self, chance: random.Random, on_stall: Callable[[], object] = bool) -> None:
        self._chance, self._on_stall = chance, on_stall
        self._free_at = 0.0  # when the last segment has left
        self._last = 0.0  # when the last segment arrives

    def arrives_at(self, conditions: Conditions, now: float, size: int) -> float:
        """Returns when a segment arrives that is sent now.

        Args:
            conditions: the conditions of the link.
            now: the time, in seconds.
            size: bytes of the segment.
        """
        self._free_at = max(self._free_at, now)
        if conditions.bytes_per_s:
            self._free_at += size / conditions.bytes_per_s
        took_s = conditions.delay_s
        if conditions.jitter_s:
            took_s += self._chance.uniform(-conditions.jitter_s, conditions.jitter_s)
        if conditions.stall_share and self._chance.random() < conditions.stall_share:
            took_s += conditions.stall_s
            self._on_stall()
        self._last = max(self._last, self._free_at + took_s)
        return self._last


__all__ = ["Conditions", "Direction", "Line"]
