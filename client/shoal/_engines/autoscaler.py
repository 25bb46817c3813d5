"""Scaling of workers by the metric `shoal_coordinator_wanted_workers`."""

import functools
import threading
import time
from collections.abc import Callable, Mapping

from shoal import errors
from shoal._system.logs import Log

_log = Log(__name__)

# Seconds between two looks at the metric.
_PERIOD_S = 2.0
# Most reasons in the log before all goes well again.
_MOST_REASONS = 20


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

    Workers are added at the same time, each by a thread of its own, so that an engine can start nodes for all of them.

    Args:
        scaling: decides.
        wanted: returns the metric.
        workers: returns the workers by name, and whether each of them has a job. One that is being added counts as one
            with a job, from its naming on.
        name: returns the name of a new worker.
        add: adds the worker of a name, and returns when it is there.
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
        name: Callable[[], str],
        add: Callable[[str], object],
        remove: Callable[[str], object],
        period_s: float = _PERIOD_S,
    ) -> None:
        self._scaling, self._wanted, self._workers = scaling, wanted, workers
        self._name, self._add, self._remove, self._period_s = name, add, remove, period_s
        self._stopping = threading.Event()
        self._lock, self._reasons = threading.Lock(), set[str]()  # the reasons that the log has, since all went well
        self._additions: list[threading.Thread] = []  # of the thread
        self._thread = threading.Thread(target=self._run, name="autoscaler", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends the threads, and waits for them for at most `timeout_s` seconds."""
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        for thread in self._additions:
            thread.join(max(0.0, deadline - time.monotonic()))

    def look(self) -> None:
        """Looks at the metric once. Only the thread and tests call it."""
        self._additions = [thread for thread in self._additions if thread.is_alive()]
        if self._succeeds(self._change) and not self._additions:
            with self._lock:
                self._reasons.clear()

    def _change(self) -> None:
        added, removed = self._scaling.change(self._wanted(), self._workers(), time.monotonic())
        for _ in range(added):
            if not self._stopping.is_set():
                self._start_addition(self._name())
        for name in removed:
            self._remove(name)

    def _start_addition(self, name: str) -> None:
        addition = functools.partial(self._add, name)
        thread = threading.Thread(target=self._succeeds, args=[addition], name=f"addition of {name}", daemon=True)
        thread.start()
        self._additions.append(thread)

    def _succeeds(self, action: Callable[[], object]) -> bool:
        """Does something, and returns whether it raised no exception. A thread must not end because of one."""
        try:
            action()
        except Exception as error:  # of Shoal or of the engine
            reason = error.message if isinstance(error, errors.ShoalError) else f"{type(error).__name__}: {error}"
            with self._lock:
                new = reason not in self._reasons and len(self._reasons) < _MOST_REASONS
                self._reasons.add(reason)
            if new and not self._stopping.is_set():  # once, and not at each look
                _log.warning("cannot change the number of workers", reason=reason)
            return False
        return True

    def _run(self) -> None:
        while not self._stopping.wait(self._period_s):
            self.look()


__all__ = ["Autoscaler", "WorkerScaling"]
