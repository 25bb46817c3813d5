"""How often calls were repeated because nobody answered: counted where they are made, told in the worker's metrics."""

import threading
from collections import Counter
from typing import Literal

Called = Literal["coordinator", "server"]
CALLED: tuple[Called, ...] = ("coordinator", "server")


class Retries:
    """A count by what was called. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _counts
        self._counts: Counter[Called] = Counter()

    def count(self, called: Called) -> None:
        """A call is repeated."""
        with self._lock:
            self._counts[called] += 1

    def take(self) -> dict[Called, int]:
        """The counts since the last time."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)


__all__ = ["CALLED", "Called", "Retries"]
