"""Clock of one machine, which may be wrong: simulated time with an offset and another pace."""

from collections.abc import Callable
from dataclasses import dataclass

# The true time at the beginning of a run, in seconds of Unix time.
START = 1_000_000.0


@dataclass
class Clock:
    """A machine's clock.

    Attributes:
        true: returns the seconds since the beginning of the run.
        offset_s: how far the wall clock is off.
        pace: seconds of this clock in one true second.
    """

    true: Callable[[], float]
    offset_s: float = 0.0
    pace: float = 1.0

    def monotonic(self) -> float:
        """Returns seconds that never go back, from any origin."""
        return self.true() * self.pace

    def steady(self) -> Callable[[], float]:
        """Returns a clock that starts at this machine's Unix time and never jumps, as a coordinator's does."""
        offset = START + self.offset_s + self.true() * (1.0 - self.pace)
        return lambda: self.true() * self.pace + offset

    def wall(self) -> float:
        """Returns this machine's Unix time."""
        return START + self.offset_s + self.true()
