"""Accesses to checkpoint storage that an effect waits for, each with a deadline. Most of them are reads.

A thread that waits for a storage cannot be ended. So each access runs on a thread of its own. If that thread hangs, the
effect stops waiting for it, and a later attempt tries again. The number of these threads is limited, one for each job
and a few in all.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from shoal import errors
from shoal._checkpoint import Catalogue, FileEntry, Manifest

T = TypeVar("T")

# Longest time, in seconds, that an effect waits for one access, such as the read of a list or of a manifest.
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

    def run(
        self, job: str, what: str, read: Callable[[], T], is_wanted: Callable[[], bool], *, verb: str = "return"
    ) -> T:
        """Returns the result of a read, or of another access.

        Args:
            job: Name of the job that waits for it.
            what: Path or URL of what is read.
            read: Reads; called on another thread.
            is_wanted: Returns whether the result is still needed.
            verb: What the storage should do with `what`, for errors.

        Raises:
            StorageFailed: The read did not end in time, an earlier read of this job hangs, or too many reads hang.
            Cancelled: The result is not needed any more.
        """
        result: Future[T] = Future()
        until = self._clock() + self._timeout_s
        with self._lock:
            if hanging := self._running.get(job):
                raise errors.StorageFailed(f"an earlier access to {hanging} for job {job} hangs; check the storage")
            if len(self._running) >= _MOST_READS:
                raise errors.StorageFailed(
                    f"{what} was not reached, because {_MOST_READS} other accesses hang; check the checkpoint storage"
                )
            self._running[job] = what
        threading.Thread(target=self._read, args=(job, read, result), name=f"read-{job}", daemon=True).start()
        return self._wait(result, f"{verb} {what}", until, is_wanted)

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
                    f"the checkpoint storage did not {what} within {self._timeout_s:g} s; check the storage"
                )
            try:
                return result.result(min(left_s, _CHECK_S))
            except TimeoutError:
                if result.done():  # the read itself raised it
                    raise
        raise errors.Cancelled(f"to {what} is not needed any more: the job has ended, or the coordinator stops")


class TimedCatalogue(Catalogue):
    """A catalogue for one effect. All accesses that the effects of checkpoints make have a deadline.

    Args:
        catalogue: The catalogue.
        reads: The accesses that run now.
        job: Name of the effect's job.
        is_wanted: Returns whether the effect should go on.
    """

    def __init__(self, catalogue: Catalogue, reads: StorageReads, job: str, is_wanted: Callable[[], bool]) -> None:
        super().__init__(catalogue.folder)
        self._catalogue, self._reads, self._job, self._is_wanted = catalogue, reads, job, is_wanted

    def numbers(self, job: str) -> list[int]:
        """Returns the complete checkpoints of a job, oldest first."""
        return self._timed(self._url(job), lambda: self._catalogue.numbers(job))

    def incomplete(self, job: str) -> list[int]:
        """Returns the incomplete checkpoints of a job, oldest first."""
        return self._timed(self._url(job), lambda: self._catalogue.incomplete(job))

    def next_number(self, job: str) -> int:
        """Returns a number above those of all checkpoints of the job, incomplete ones included."""
        return self._timed(self._url(job), lambda: self._catalogue.next_number(job))

    def manifest(self, job: str, number: int) -> Manifest:
        """Reads the manifest of a checkpoint; raises as `Catalogue.manifest`."""
        what = f"the manifest of {self._url(job, number)}"
        return self._timed(what, lambda: self._catalogue.manifest(job, number))

    def publish(self, manifest: Manifest) -> None:
        """Completes a checkpoint. If the deadline expires, the storage may still complete it later."""
        what = f"the manifest of {self._url(manifest.job, manifest.number)}"
        self._timed(what, lambda: self._catalogue.publish(manifest), "write")

    def file_bytes(self, job: str, number: int, entry: FileEntry) -> int:
        """Returns the size of a file of a checkpoint; -1 if it does not exist.

        Args:
            job: Name of the job.
            number: Number of the checkpoint.
            entry: The file's entry in the manifest.
        """
        what = f"the size of {self._url(job, number)}/{entry.name}"
        return self._timed(what, lambda: self._catalogue.file_bytes(job, number, entry))

    def remove(self, job: str, number: int) -> None:
        """Removes a complete or incomplete checkpoint. If the deadline expires, the storage may still remove it."""
        self._timed(self._url(job, number), lambda: self._catalogue.remove(job, number), "remove")

    def _url(self, *path: str | int) -> str:
        return "/".join((self.folder.url, *(part if isinstance(part, str) else f"{part:08}" for part in path)))

    def _timed(self, what: str, access: Callable[[], T], verb: str = "return") -> T:
        return self._reads.run(self._job, what, access, self._is_wanted, verb=verb)


__all__ = ["READ_TIMEOUT_S", "StorageReads", "TimedCatalogue"]
