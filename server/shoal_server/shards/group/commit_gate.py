"""Commit gate: holds back the commits of a job on one server while a checkpoint's cut reaches all servers."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal import errors
from shoal_server.shards.group.call_wait import CallWait

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
        self._waiting: set[GateWait] = set()
        self._timer: threading.Timer | None = None  # looks at the gate when the cut expires, while commits wait

    @contextmanager
    def passing(self, waiting: set[CallWait]) -> Iterator["GateWait | None"]:
        """Delays the next cut until the block ends, unless a cut holds the gate now.

        Args:
            waiting: gets the wait, if there is one.

        Yields:
            None if no cut holds the gate. Otherwise, the wait until it opens: nothing may be committed before.
        """
        with self._changed:
            wait = self._wait(waiting)
            if wait is None:
                self._cut = 0  # that cut has expired
                self._passing += 1
        if wait:
            yield wait
            return
        try:
            yield None
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
            if not self._passing:
                return
            self._cut = 0
        self._release()
        raise errors.Overloaded(f"running commits took longer than {HOLD_S:g} s; take the cut again later")

    def resume(self, cut: int) -> None:
        """Lets commits pass again if this cut holds them and its snapshots are not being taken now."""
        with self._changed:
            if self._cut == cut and self._until < float("inf"):
                self._cut = 0
                self._changed.notify_all()
        self._release()

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
        self._release()

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
            self._release()

    @property
    def _held_s(self) -> float:
        """Seconds until the gate opens; 0 or less if it is open."""
        if self._closed or not self._cut:
            return 0.0
        return min(self._until - self._clock(), MAX_PAUSE_S)

    def _wait(self, waiting: set[CallWait]) -> "GateWait | None":
        """Returns a new wait if a cut holds the gate. Called with the lock."""
        if (held_s := self._held_s) <= 0:
            return None
        wait = GateWait(waiting, self._forget)
        self._waiting.add(wait)
        self._watch(held_s)
        return wait

    def _watch(self, held_s: float) -> None:
        """Looks at the gate again after some seconds, because a cut may expire. Called with the lock."""
        if self._timer is None:
            self._timer = threading.Timer(held_s, self._look_again)
            self._timer.daemon = True
            self._timer.start()

    def _look_again(self) -> None:
        with self._changed:
            self._timer = None
            if self._waiting and (held_s := self._held_s) > 0:
                self._watch(held_s)
        self._release()

    def _release(self) -> None:
        """Ends all waits if no cut holds the gate. Called without the lock."""
        with self._changed:
            if self._held_s > 0 or not self._waiting:
                return
            ready, self._waiting = self._waiting, set()
            timer, self._timer = self._timer, None
        if timer:
            timer.cancel()
        for wait in ready:
            wait.release()

    def _forget(self, wait: "GateWait") -> None:
        with self._changed:
            self._waiting.discard(wait)


class GateWait(CallWait):
    """The wait of a commit, until no cut holds the gate. The commit then has to ask the gate again.

    Args:
        waiting: as for `CallWait`.
        forget: called if the wait ends before the gate has opened.
    """

    def __init__(self, waiting: set[CallWait], forget: Callable[["GateWait"], object]) -> None:
        super().__init__(waiting, math.inf)  # a cut expires
        self._forget = forget

    def release(self) -> None:
        """Ends the wait, because the gate has opened."""
        self._end(None)

    def _refusal(self) -> errors.ShoalError:
        return errors.Cancelled("the call ended while a cut held back its commit")

    def _stop(self) -> None:
        self._forget(self)


__all__ = ["HOLD_S", "MAX_PAUSE_S", "CommitGate", "GateWait"]
