"""Exponential backoff between attempts of a failed call."""

from collections.abc import Callable

from shoal._system import ENTROPY

_FIRST_S, _LONGEST_S = 0.05, 2.0


class Backoff:
    """Pauses that double each time up to a limit, each shortened at random by up to half.

    The random part prevents many workers from retrying at the same time.

    Args:
        jitter: returns a random number in [0, 1) for each pause.
        first_s: seconds of the first pause.
        longest_s: seconds of the longest pause.

    Attributes:
        at_most: seconds of the next pause before it is shortened.
    """

    def __init__(
        self, jitter: Callable[[], float] = ENTROPY.random, *, first_s: float = _FIRST_S, longest_s: float = _LONGEST_S
    ) -> None:
        self._jitter, self._first_s, self._longest_s = jitter, first_s, longest_s
        self.at_most = first_s

    def next(self) -> float:
        """Returns the next pause in seconds, and doubles the one after it."""
        pause, self.at_most = self.at_most, min(2 * self.at_most, self._longest_s)
        return pause * (1 - self._jitter() / 2)

    def reset(self) -> None:
        """Restarts at the first pause, after a successful call."""
        self.at_most = self._first_s


__all__ = ["Backoff"]
