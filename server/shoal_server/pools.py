"""Thread pools that answer calls and report how busy they are."""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

# Threads for the kinds of calls that only the coordinator makes: workers enter and leave, shards are created, copies
# change, and lock groups are split. The store creates the shards of one call at a time.
_OF_THE_COORDINATOR = {"workers": 8, "creation": 1, "copies": 4, "splits": 2}


class CallPool(ThreadPoolExecutor):
    """A thread pool that reports how busy it is.

    Args:
        threads: maximum number of threads.
        name: prefix of the threads' names.

    Attributes:
        threads: maximum number of threads.
    """

    def __init__(self, threads: int, name: str) -> None:
        super().__init__(threads, thread_name_prefix=name)
        self.threads = threads
        self._lock = threading.Lock()  # guards _unfinished
        self._unfinished = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future = super().submit(fn, *args, **kwargs)
        self._count(1)
        future.add_done_callback(lambda _: self._count(-1))
        return future

    @property
    def busy(self) -> int:
        """Number of threads at work."""
        return max(0, min(self._unfinished, self.threads))

    @property
    def queued(self) -> int:
        """Number of calls that wait for a thread."""
        return max(0, self._unfinished - self.threads)

    def _count(self, change: int) -> None:
        with self._lock:
            self._unfinished += change


def call_pools(rpc_threads: int) -> dict[str, CallPool]:
    """Returns the threads of a server for each kind of call that must not wait for another kind.

    Args:
        rpc_threads: maximum number of threads for each kind of call that workers and other servers make.
    """
    kinds = dict.fromkeys(("pull", "push", "commit", "norm"), rpc_threads) | _OF_THE_COORDINATOR
    return {kind: CallPool(threads, kind) for kind, threads in kinds.items()}
