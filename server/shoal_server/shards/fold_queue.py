"""Fold queue: contributions that are added to the running sums of a lock group, in order and without its lock."""

import threading
from collections import deque
from collections.abc import Callable

from shoal import errors
from shoal_server.shards.mode import Contribution, Fold


class FoldQueue:
    """Contributions that the state machine has released for folding.

    Args:
        fold: adds a contribution to the running sums, given the number of contributions that they make room for.

    Attributes:
        count: number of contributions that were ever folded.
    """

    def __init__(self, fold: Callable[[Contribution, int], None]) -> None:
        self._fold = fold
        # Held while contributions are folded; taken alone or after the group's lock. Only the locks of the kernel
        # threads are taken under it.
        self._working = threading.Lock()
        self._released: deque[tuple[Contribution, int]] = deque()  # added to under the group's lock
        self._failed = False
        self.count = 0

    def add(self, fold: Fold) -> None:
        """Adds contributions. Called with the group's lock, so that they stay in order."""
        self._released.extend((contribution, fold.expected) for contribution in fold.contributions)

    def work(self) -> None:
        """Folds everything that was added before this call, or waits for the thread that does; raises as `work_on`."""
        while self.work_on():
            pass

    def work_on(self) -> bool:
        """Folds the next contribution, after the thread that folds one now.

        Returns:
            Whether there was one. If not, everything that was added before this call is folded.

        Raises:
            InternalError: an earlier fold failed, so that the sums are incomplete.
        """
        with self._working:
            if self._failed:
                raise errors.InternalError("a gradient could not be added to its step's sum; the step is lost")
            if not self._released:
                return False
            self._failed = True
            self._fold(*self._released.popleft())
            self.count += 1
            self._failed = False
            return True


__all__ = ["FoldQueue"]
