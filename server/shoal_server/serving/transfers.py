"""Transfers of gradients in progress: at most one for each worker, so that a worker takes the memory of one gradient.

A client may have many lanes and calls. Without this limit, it could send the beginning of a push on each of them, and
the server would keep a gradient for each.
"""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from shoal import errors
from shoal_server.serving.pending_push import PendingPush

# Seconds for an earlier transfer to end after its call was ended.
_END_S = 5.0


class _Transfer:
    """The transfer of one call: a context manager, which ends an earlier transfer of its worker first."""

    def __init__(self, transfers: "Transfers", push: PendingPush, end: Callable[[], object]) -> None:
        self._transfers, self._end = transfers, end
        self._worker = push.header.stamp.job, push.stamp.worker
        self._runs = threading.Lock()  # held until the transfer is over
        self._runs.acquire()

    def __enter__(self) -> None:
        if earlier := self._transfers.begin(self._worker, self):
            try:
                earlier.end()
            except BaseException:
                self.__exit__()
                raise

    def __exit__(self, *_: object) -> None:
        self._runs.release()
        self._transfers.forget(self._worker, self)

    def end(self) -> None:
        """Ends the call of this transfer, and waits until the transfer is over.

        Raises:
            Overloaded: it does not end.
        """
        self._end()
        if not self._runs.acquire(timeout=_END_S):
            raise errors.Overloaded(
                f"an earlier push of {self._worker[1]} has not ended {_END_S:g} s after this one; repeat it"
            )
        self._runs.release()


class Transfers:
    """The transfers in progress on a server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _newest; nothing is called under it
        self._newest: dict[tuple[str, str], _Transfer] = {}  # by job and worker

    def only(self, push: PendingPush, end: Callable[[], object]) -> AbstractContextManager[None]:
        """Marks the block as the transfer of a push. It ends an earlier transfer of the worker first.

        A worker sends its next push after the answer to the one before, or when the call of that one has failed. So the
        client does not wait for the earlier transfer any more.

        Args:
            push: the push.
            end: ends the call of this push. Other threads call it, at most once.

        Returns:
            A context manager. Entering it raises Overloaded if the earlier transfer does not end.
        """
        return _Transfer(self, push, end)

    def begin(self, worker: tuple[str, str], mine: _Transfer) -> _Transfer | None:
        """Makes a transfer the newest one of a worker, by job and name. Returns the one before, unless that is over."""
        with self._lock:
            earlier, self._newest[worker] = self._newest.get(worker), mine
        return earlier

    def forget(self, worker: tuple[str, str], mine: _Transfer) -> None:
        """Forgets a transfer that is over, unless another one has followed."""
        with self._lock:
            if self._newest.get(worker) is mine:
                del self._newest[worker]


__all__ = ["Transfers"]
