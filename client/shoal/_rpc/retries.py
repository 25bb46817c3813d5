"""Counts of repeated calls, for the metrics of workers."""

import threading
from collections import Counter
from typing import Literal

RetryTarget = Literal["coordinator", "server"]
RETRY_TARGETS: tuple[RetryTarget, ...] = ("coordinator", "server")


class Retries:
    """Counts of repeated calls by target. Any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _counts
        self._counts: Counter[RetryTarget] = Counter()

    def count(self, target: RetryTarget) -> None:
        """Counts one repeated call."""
        with self._lock:
            self._counts[target] += 1

    def take(self) -> dict[RetryTarget, int]:
        """Returns the counts since the last call of `take`."""
        with self._lock:
            counts, self._counts = self._counts, Counter()
        return dict(counts)


__all__ = ["RETRY_TARGETS", "Retries", "RetryTarget"]
