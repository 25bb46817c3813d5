"""Exponential backoff between attempts of a failed call."""

import random
from collections.abc import Callable

_FIRST_S, _LONGEST_S = 0.05, 2.0


class Backoff:
    """Pauses of 0.05 s, doubled each time up to 2 s, and each shortened at random by up to half.

    The random part prevents many workers from retrying at the same time.

    Args:
        jitter: returns a random number in [0, 1) for each pause.

    Attributes:
        at_most: seconds of the next pause before it is shortened.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self.at_most = _FIRST_S

    def next(self) -> float:
        """Returns the next pause in seconds, and doubles the one after it."""
        pause, self.at_most = self.at_most, min(2 * self.at_most, _LONGEST_S)
        return pause * (1 - self._jitter() / 2)

    def reset(self) -> None:
        """Restarts at the first pause, after a successful call."""
        self.at_most = _FIRST_S


__all__ = ["Backoff"]
