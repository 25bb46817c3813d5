"""Transfers of gradients in progress: at most one for each worker, so that a worker takes the memory of one gradient.

A client may have many lanes and calls. Without this limit, it could send the beginning of a push on each of them, and
the server would keep a gradient for each.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shoal import errors
from shoal_server.serving.pending_push import PendingPush

# Seconds for an earlier transfer to end after its call was ended.
_END_S = 5.0


class _Transfer:
    """The transfer of one call."""

    def __init__(self, end: Callable[[], object]) -> None:
        self.end, self.over = end, threading.Event()


class Transfers:
    """The transfers in progress on a server. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _newest; nothing is called under it
        self._newest: dict[tuple[str, str], _Transfer] = {}  # by job and worker

    @contextmanager
    def only(self, push: PendingPush, end: Callable[[], object]) -> Iterator[None]:
        """Marks the block as the transfer of a push. It ends an earlier transfer of the worker first.

        A worker sends its next push after the answer to the one before, or when the call of that one has failed. So the
        client does not wait for the earlier transfer any more.

        Args:
            push: the push.
            end: ends the call of this push. Other threads call it, at most once.

        Raises:
            Overloaded: the earlier transfer does not end.
        """
        worker, mine = (push.header.stamp.job, push.stamp.worker), _Transfer(end)
        with self._lock:
            earlier, self._newest[worker] = self._newest.get(worker), mine
        try:
            if earlier:
                earlier.end()
                if not earlier.over.wait(_END_S):
                    raise errors.Overloaded(
                        f"an earlier push of {push.stamp.worker} has not ended {_END_S:g} s after this one; repeat it"
                    )
            yield
        finally:
            mine.over.set()
            with self._lock:
                if self._newest.get(worker) is mine:
                    del self._newest[worker]


__all__ = ["Transfers"]
