"""Commit gate: holds back the commits of a job on one server while a checkpoint's cut reaches all servers."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal import errors

# Seconds after which an unfinished cut expires, so that training does not wait for a coordinator that died.
HOLD_S = 2.0
# Longest time, in seconds, for which commits stay held after a cut.
MAX_PAUSE_S = 60.0


class CommitGate:
    """Holds back commits during a cut.

    A cut takes two calls to each server (`HoldCommits`, `Save`). Between them no commit begins on any server, so a push
    that is committed on one can be completed on all. A job that will restart from the cut can be held longer.

    Args:
        clock: monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()  # its lock guards all below; no other lock is taken under it
        self._passing = 0
        self._cut = 0  # the cut that holds the gate; 0 if none
        self._until = 0.0
        self._closed = False

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Waits while a cut holds the gate, and delays the next cut until the block ends."""
        with self._changed:
            while self._held_s > 0:
                self._changed.wait(self._held_s)
            self._cut = 0  # that cut has expired
            self._passing += 1
        try:
            yield
        finally:
            with self._changed:
                self._passing -= 1
                self._changed.notify_all()

    def hold(self, cut: int) -> None:
        """Holds back new commits and waits for the running ones. A later cut replaces an earlier one.

        Raises:
            Overloaded: the running commits do not end in time.
        """
        with self._changed:
            self._cut, self._until = cut, self._clock() + HOLD_S
            while self._passing and self._held_s > 0:
                self._changed.wait(self._held_s)
            if self._passing:
                self._cut = 0
                raise errors.Overloaded(f"running commits took longer than {HOLD_S:g} s; take the cut again later")

    def resume(self, cut: int) -> None:
        """Lets commits pass again if this cut holds them and its snapshots are not being taken now."""
        with self._changed:
            if self._cut == cut and self._until < float("inf"):
                self._cut = 0
                self._changed.notify_all()

    @property
    def is_held(self) -> bool:
        """Whether a cut holds back commits now."""
        with self._changed:
            return self._held_s > 0

    def close(self) -> None:
        """Opens the gate permanently. The shards behind it are closed and refuse commits themselves."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @contextmanager
    def held(self, cut: int, pause_s: float = 0.0) -> Iterator[None]:
        """Keeps the gate held while the block takes the cut's snapshots; then commits pass again.

        Args:
            cut: number of the cut.
            pause_s: seconds for which commits stay held after the block, unless the cut is resumed earlier.

        Raises:
            Cancelled: the cut no longer holds the gate, so commits may have passed.
        """
        with self._changed:
            if self._cut != cut or self._held_s <= 0:
                raise errors.Cancelled(f"cut {cut} expired after {HOLD_S:g} s, or another has begun: nothing was saved")
            self._until = float("inf")  # the cut is being taken: no commit passes until the block ends
        try:
            yield
        except BaseException:
            pause_s = 0.0  # no snapshot was taken
            raise
        finally:
            with self._changed:
                self._until = self._clock() + pause_s
                self._changed.notify_all()

    @property
    def _held_s(self) -> float:
        """Seconds until the gate opens; 0 or less if it is open."""
        if self._closed or not self._cut:
            return 0.0
        return min(self._until - self._clock(), MAX_PAUSE_S)


__all__ = ["HOLD_S", "MAX_PAUSE_S", "CommitGate"]
