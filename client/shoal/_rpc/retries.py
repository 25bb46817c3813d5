"""How often calls were repeated because nobody answered: counted where they are made, told in the worker's metrics."""

import threading
from collections import Counter
from typing import Literal

RetryTarget = Literal["coordinator", "server"]
RETRY_TARGETS: tuple[RetryTarget, ...] = ("coordinator", "server")


class Retries:
    """A count by what was called. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _counts
        self._counts: Counter[RetryTarget] = Counter()

    def count(self, called: RetryTarget) -> None:
        """A call is repeated."""
        with self._lock:
            self._counts[called] += 1

    def take(self) -> dict[RetryTarget, int]:
        """The counts since the last time."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)


__all__ = ["RETRY_TARGETS", "Retries", "RetryTarget"]
