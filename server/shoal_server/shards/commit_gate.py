"""What a checkpoint's cut holds back for a moment: the commits of a job, on every server until all have been told."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal import errors

# A cut whose coordinator does not come back is over after so long: training must not wait for one that died.
HOLD_S = 2.0
# The longest that commits stay held back after a cut.
MAX_PAUSE_S = 60.0


class CommitGate:
    """Lets commits pass, but while a cut holds it.

    A cut takes two calls to each server (`Hold`, `Save`). Between them no commit begins on any, so what is committed on
    one can be completed on all. A job that is to go back to what was cut may be held a while longer.

    Args:
        clock: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # its lock guards all below; no other is taken under it
        self._passing = 0
        self._cut = 0  # that holds it; 0: none
        self._until = 0.0
        self._closed = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Waits while it is held, and holds up a cut until the block ends."""
        with self._changed:
            while self._held_s > 0:
                self._changed.wait(self._held_s)
            self._cut = 0  # of which nobody came back
            self._passing += 1
        try:
            yield
        finally:
            with self._changed:
                self._passing -= 1
                self._changed.notify_all()

    def hold(self, cut: int) -> None:
        """Holds back new commits and waits for those that have begun; a later cut takes the place of an earlier one.

        Raises:
            Overloaded: commits do not end.
        """
        with self._changed:
            self._cut, self._until = cut, self._clock() + HOLD_S
            while self._passing and self._held_s > 0:
                self._changed.wait(self._held_s)
            if self._passing:
                self._cut = 0
                raise errors.Overloaded(f"commits that had begun took longer than {HOLD_S:g} s; cut again later")

    def give_up(self, cut: int) -> None:
        """Lets commits pass again, if it is this cut that holds them back and it is not being made."""
        with self._changed:
            if self._cut == cut and self._until < float("inf"):
                self._cut = 0
                self._changed.notify_all()

    def close(self) -> None:
        """Lets all pass from now on, for good: the shards behind it are gone, and refuse commits themselves."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def held(self, cut: int, pause_s: float = 0.0) -> Iterator[None]:
        """While a cut that holds it is made; then commits pass again.

        Args:
            cut: which.
            pause_s: seconds that they wait even then, unless the cut is given up.

        Raises:
            Cancelled: it does not hold it any more, so commits may have passed.
        """
        with self._changed:
            if self._cut != cut or self._held_s <= 0:
                raise errors.Cancelled(
                    f"cut {cut} came later than {HOLD_S:g} s after it began, or another has begun: nothing was saved"
                )
            self._until = float("inf")  # it is here: nobody passes before it is made
        try:
            yield
        except BaseException:
            pause_s = 0.0  # nothing was cut
            raise
        finally:
            with self._changed:
                self._until = self._clock() + pause_s
                self._changed.notify_all()

    @property
    def _held_s(self) -> float:
        """How much longer; 0 or less: it is open."""
        if self._closed or not self._cut:
            return 0.0
        return min(self._until - self._clock(), MAX_PAUSE_S)


__all__ = ["HOLD_S", "MAX_PAUSE_S", "CommitGate"]
