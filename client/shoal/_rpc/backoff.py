"""How long to wait before something that failed is tried again."""

import random
from collections.abc import Callable

_FIRST_S, _LONGEST_S = 0.05, 2.0


class Backoff:
    """0.05 s, then twice as long each time up to 2 s; each shortened by up to half at random.

    So a thousand workers do not come back at once.

    Args:
        jitter: a number in [0, 1), drawn for each pause.

    Attributes:
        at_most: seconds of the next one, before it is shortened.
    """

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        self._jitter = jitter
        self.at_most = _FIRST_S

    def next(self) -> float:
        """Seconds to wait now."""
        pause, self.at_most = self.at_most, min(2 * self.at_most, _LONGEST_S)
        return pause * (1 - self._jitter() / 2)

    def reset(self) -> None:
        """It went well: the next one is the first again."""
        self.at_most = _FIRST_S


__all__ = ["Backoff"]
