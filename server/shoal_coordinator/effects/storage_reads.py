"""Reads of checkpoint storage that a restore waits for, each with a deadline.

A thread that waits for a storage cannot be ended. So each read runs on a thread of its own. If that thread hangs, the
restore stops waiting for it, and a later attempt reads again. The number of these threads is limited, one for each job
and a few in all.
"""

import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shoal import errors
from shoal._checkpoint import Catalogue, Manifest

T = TypeVar("T")

# Longest time, in seconds, that a restore waits for a list of checkpoints or for a manifest.
READ_TIMEOUT_S = 60.0
# The number of reads that may run, or hang, at the same time.
_MOST_READS = 32
# Seconds between two checks whether a read is still wanted.
_CHECK_S = 0.25


class StorageReads:
    """The reads that run now. Any thread may use it.

    Args:
        timeout_s: Longest time that a caller waits for a read.
        clock: Returns seconds that never go back.
    """

    def __init__(self, timeout_s: float = READ_TIMEOUT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._timeout_s, self._clock = timeout_s, clock
        self._lock = threading.Lock()  # guards _running
        self._running: dict[str, str] = {}  # what is read, by the job that reads

    def run(self, job: str, what: str, read: Callable[[], T], is_wanted: Callable[[], bool]) -> T:
        """Returns the result of a read.

        Args:
            job: Name of the job that waits for it.
            what: Path or URL of what is read.
            read: Reads; called on another thread.
            is_wanted: Returns whether the result is still needed.

        Raises:
            StorageFailed: The read did not end in time, an earlier read of this job hangs, or too many reads hang.
            Cancelled: The result is not needed any more.
        """
        result: Future[T] = Future()
        until = self._clock() + self._timeout_s
        with self._lock:
            if hanging := self._running.get(job):
                raise errors.StorageFailed(f"an earlier read of {hanging} for job {job} hangs; check the storage")
            if len(self._running) >= _MOST_READS:
                raise errors.StorageFailed(f"{what} was not read, because {_MOST_READS} other reads hang; check them")
            self._running[job] = what
        threading.Thread(target=self._read, args=(job, read, result), name=f"read-{job}", daemon=True).start()
        return self._wait(result, what, until, is_wanted)

    def _read(self, job: str, read: Callable[[], T], result: "Future[T]") -> None:
        try:
            value = read()
        except BaseException as error:
            self._ended(job)
            result.set_exception(error)
        else:
            self._ended(job)
            result.set_result(value)

    def _ended(self, job: str) -> None:
        with self._lock:
            del self._running[job]

    def _wait(self, result: "Future[T]", what: str, until: float, is_wanted: Callable[[], bool]) -> T:
        while is_wanted():
            left_s = until - self._clock()
            if left_s <= 0:
                raise errors.StorageFailed(
                    f"the checkpoint storage did not return {what} within {self._timeout_s:g} s; check the storage"
                )
            try:
                return result.result(min(left_s, _CHECK_S))
            except TimeoutError:
                if result.done():  # the read itself raised it
                    raise
        raise errors.Cancelled(f"{what} is not needed any more: the job has ended, or the coordinator stops")


class TimedCatalogue(Catalogue):
    """A catalogue for one restore, whose reads have a deadline.

    Args:
        catalogue: The catalogue.
        reads: The reads that run now.
        job: Name of the job that is restored.
        is_wanted: Returns whether the restore should go on.
    """

    def __init__(self, catalogue: Catalogue, reads: StorageReads, job: str, is_wanted: Callable[[], bool]) -> None:
        super().__init__(catalogue.folder)
        self._reads, self._job, self._is_wanted = reads, job, is_wanted

    def numbers(self, job: str) -> list[int]:
        """Returns the complete checkpoints of a job, oldest first."""
        return self._timed(f"{self.folder.url}/{job}", functools.partial(super().numbers, job))

    def manifest(self, job: str, number: int) -> Manifest:
        """Reads the manifest of a checkpoint; raises as `Catalogue.manifest`."""
        what = f"the manifest of {self.folder.url}/{job}/{number:08}"
        return self._timed(what, functools.partial(super().manifest, job, number))

    def _timed(self, what: str, read: Callable[[], T]) -> T:
        return self._reads.run(self._job, what, read, self._is_wanted)


__all__ = ["READ_TIMEOUT_S", "StorageReads", "TimedCatalogue"]
