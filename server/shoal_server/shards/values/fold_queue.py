"""Fold queue: adds contributions to the running sums of a lock group, in order, without holding the group's lock."""

import threading
from collections import deque
from collections.abc import Callable

from shoal import errors
from shoal_server.shards.machine.mode import Contribution, Fold


class FoldQueue:
    """Contributions that the state machine has released for folding.

    Args:
        fold: adds a contribution to the running sums. Its second argument is the number of contributions for which the
            sums make room.

    Attributes:
        count: number of contributions that were ever folded.
    """

    def __init__(self, fold: Callable[[Contribution, int], None]) -> None:
        self._fold = fold
        # Held while contributions are folded; taken alone or after the group's lock. Only the locks of the kernel
        # threads are taken under it.
        self._working = threading.Lock()
        self._released: deque[tuple[Contribution, int]] = deque()  # added to under the group's lock
        self._failure: BaseException | None = None  # of an earlier fold; the sums are incomplete
        self.count = 0

    def add(self, fold: Fold) -> None:
        """Adds contributions. Called with the group's lock, so that they stay in order."""
        self._released.extend((contribution, fold.expected) for contribution in fold.contributions)

    def work(self, *, at_once: bool = True) -> bool:
        """Folds the contributions that were added before this call. If another thread folds now, waits for it first.

        Args:
            at_once: whether to fold all contributions; if not, only the next one.

        Returns:
            Whether more contributions may be left to fold.

        Raises:
            InternalError: an earlier fold failed, so that the sums are incomplete.
        """
        with self._working:
            if self._failure:
                kind = type(self._failure).__name__
                raise errors.InternalError(f"a gradient was not added to its step's sum: {kind}: {self._failure}")
            while self._released:
                try:
                    self._fold(*self._released.popleft())
                except BaseException as failure:
                    self._failure = failure
                    raise
                self.count += 1
                if not at_once:
                    break
            else:
                at_once = True
        return not at_once


__all__ = ["FoldQueue"]
