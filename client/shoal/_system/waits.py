"""Notices about long waits: a line for people that says what waits, for what, and since when.

`WaitNotices` decides (no clock, no I/O), and `WaitWatch` is the thread that asks it and writes the lines. The lines are
warnings of the standard library's logger `shoal`, which go to standard error unless the program configures it
otherwise. The thread that waits does no work for these lines, so short calls do not become slower.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_LOG = logging.getLogger("shoal")

# Seconds of a wait before its first notice, and between the notices: doubled each time, up to the maximum.
NOTICE_AFTER_S, _FIRST_GAP_S, _LONGEST_GAP_S = 2.0, 4.0, 60.0
# Seconds between two looks of a watch, and the longest wait for its thread to end.
LOOK_S, _STOP_S = 0.5, 1.0


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait in progress.

    Attributes:
        what: what waits, such as "job digits".
        since: when it began, in seconds of the watch's clock.
    """

    what: str
    since: float


class WaitNotices:
    """Decides when a person is told about the waits of one thread. `now` is in seconds of any clock."""

    def __init__(self) -> None:
        self._noticed: Wait | None = None  # the wait that the last notice was about
        self._next_at = 0.0  # of that wait
        self._gap_s = _FIRST_GAP_S

    def due(self, wait: Wait, now: float) -> bool:
        """Returns whether to tell about a wait now, and counts it as told if so."""
        if wait != self._noticed:
            if now - wait.since < NOTICE_AFTER_S:
                return False
            self._gap_s = _FIRST_GAP_S
        elif now < self._next_at:
            return False
        self._noticed, self._next_at = wait, now + self._gap_s
        self._gap_s = min(2 * self._gap_s, _LONGEST_GAP_S)
        return True

    def ended(self, wait: Wait | None) -> Wait | None:
        """Returns the wait that a person was told about and that has ended, once; `wait` is the one in progress."""
        if self._noticed is None or wait == self._noticed:
            return None
        noticed, self._noticed = self._noticed, None
        return noticed


class WaitWatch:
    """A thread that writes a line when another thread has waited for two seconds, and again at growing intervals.

    Args:
        current: returns the wait in progress, or None.
        detail: returns what it waits for, such as "for rank 1"; "" if that is not known. It may call the coordinator,
            but must return within seconds. Any exception counts as "".
        clock: returns seconds; `Wait.since` is of this clock.
        each: called at each look, about twice a second.
    """

    def __init__(
        self,
        current: Callable[[], Wait | None],
        detail: Callable[[], str],
        *,
        clock: Callable[[], float] = time.monotonic,
        each: Callable[[], object] = lambda: None,
    ) -> None:
        self._current, self._detail, self._clock, self._each = current, detail, clock, each
        self._notices = WaitNotices()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wait-notices", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, *, goes_on: bool = True) -> None:
        """Ends the thread.

        Args:
            goes_on: whether the wait ended normally. If so, and a line has told a person about the wait, another line
                says that it has ended. Otherwise an error or a result follows, which says more.
        """
        if not self._stopping.is_set():
            self._stopping.set()
            self._thread.join(_STOP_S)
            if goes_on:
                self._tell_end(None)

    def look(self) -> None:
        """Writes the lines that are due now. Only the thread and tests call it."""
        wait = self._current()
        self._tell_end(wait)
        now = self._clock()
        if wait and self._notices.due(wait, now):
            began = time.strftime("%H:%M:%S", time.localtime(time.time() - (now - wait.since)))
            detail = self._details()
            if self._current() == wait:  # the details may have taken a while
                _LOG.warning(f"{wait.what} waits{detail and f' {detail}'}, since {began} ({now - wait.since:.0f} s)")

    def _run(self) -> None:
        while not self._stopping.wait(LOOK_S):
            self.look()
            self._each()

    def _details(self) -> str:
        try:
            return self._detail()
        except Exception:  # a notice must not end what it is about
            return ""

    def _tell_end(self, wait: Wait | None) -> None:
        if ended := self._notices.ended(wait):
            _LOG.warning(f"{ended.what} has waited {self._clock() - ended.since:.0f} s, and goes on")


@contextmanager
def wait_notice(what: str, detail: Callable[[], str]) -> Iterator[None]:
    """Tells a person what the block waits for, if it takes longer than two seconds; see `WaitWatch`.

    Args:
        what: what waits.
        detail: returns what it waits for.
    """
    wait = Wait(what, time.monotonic())
    watch = WaitWatch(lambda: wait, detail)
    watch.start()
    try:
        yield
    except BaseException:
        watch.stop(goes_on=False)
        raise
    watch.stop()


__all__ = ["LOOK_S", "NOTICE_AFTER_S", "Wait", "WaitNotices", "WaitWatch", "wait_notice"]
