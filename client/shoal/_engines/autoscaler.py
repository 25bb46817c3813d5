"""Scaling of workers by the metric `shoal_coordinator_wanted_workers`."""

import threading
import time
from collections.abc import Callable, Mapping

from shoal import errors
from shoal._system.logs import Log

_log = Log(__name__)

# Seconds between two looks at the metric.
_PERIOD_S = 2.0


class WorkerScaling:
    """Decides which workers to add and remove (no I/O).

    Args:
        least: smallest number of workers.
        most: largest number of workers.
        idle_s: seconds for which fewer workers must be wanted before one is removed.
    """

    def __init__(self, least: int, most: int, idle_s: float = 30.0) -> None:
        self.least, self.most, self._idle_s = least, most, idle_s
        self._fewer_since: float | None = None

    def change(self, wanted: int, workers: Mapping[str, bool], now: float) -> tuple[int, list[str]]:
        """Returns how many workers to add, and the names of those to remove. Only idle workers are removed.

        Args:
            wanted: number of workers that the jobs could use now.
            workers: the workers by name, and whether each of them has a job.
            now: seconds of any clock.
        """
        target = min(max(wanted, self.least), self.most)
        if target >= len(workers):
            self._fewer_since = None
            return target - len(workers), []
        if self._fewer_since is None:
            self._fewer_since = now
        if now - self._fewer_since < self._idle_s:
            return 0, []
        idle = [name for name, busy in workers.items() if not busy]
        return 0, idle[::-1][: len(workers) - target]


class Autoscaler:
    """A thread that adds and removes workers as a `WorkerScaling` decides.

    Args:
        scaling: decides.
        wanted: returns the metric.
        workers: returns the workers by name, and whether each of them has a job.
        add: adds a worker.
        remove: removes the worker of a name.
        period_s: seconds between two looks.

    If a function raises an exception, the log has the reason, and the next look tries again.
    """

    def __init__(
        self,
        scaling: WorkerScaling,
        *,
        wanted: Callable[[], int],
        workers: Callable[[], Mapping[str, bool]],
        add: Callable[[], object],
        remove: Callable[[str], object],
        period_s: float = _PERIOD_S,
    ) -> None:
        self._scaling, self._wanted, self._workers = scaling, wanted, workers
        self._add, self._remove, self._period_s = add, remove, period_s
        self._stopping, self._reason = threading.Event(), ""
        self._thread = threading.Thread(target=self._run, name="autoscaler", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the thread, and waits for it for at most `timeout_s` seconds."""
        self._stopping.set()
        self._thread.join(timeout_s)

    def look(self) -> None:
        """Looks at the metric once. Only the thread and tests call it."""
        try:
            added, removed = self._scaling.change(self._wanted(), self._workers(), time.monotonic())
            for _ in range(added):
                if not self._stopping.is_set():
                    self._add()
            for name in removed:
                self._remove(name)
            self._reason = ""
        except Exception as error:  # of Shoal or of the engine; the thread must not end
            reason = error.message if isinstance(error, errors.ShoalError) else f"{type(error).__name__}: {error}"
            if reason != self._reason and not self._stopping.is_set():  # once, and not at each look
                self._reason = reason
                _log.warning("cannot change the number of workers", reason=reason)

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self.look()


__all__ = ["Autoscaler", "WorkerScaling"]
