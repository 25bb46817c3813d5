"""Threads for blocking calls that are made at the same time, such as one step's calls to all servers."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TypeVar

from shoal import errors

T = TypeVar("T")

_Task = Callable[[], None]

_IDLE_S = 60.0


class CallThreads:
    """Makes several blocking calls at the same time, each on a thread of its own.

    No call waits for a thread, so a call that takes long delays no other one. One of the calls is made on the caller's
    thread. The others use idle threads, and threads are started if too few are idle: never more than there are calls.
    Any thread may use it.

    Args:
        name: name of the threads.
        idle_s: seconds after which an idle thread ends.
    """

    def __init__(self, name: str, *, idle_s: float = _IDLE_S) -> None:
        self._name, self._idle_s = name, idle_s
        self._lock = threading.Lock()  # guards the next three
        self._idle: list[queue.SimpleQueue[_Task | None]] = []  # inboxes of idle threads, the last one used at the end
        self._threads: set[threading.Thread] = set()
        self._closed = False

    @property
    def count(self) -> int:
        """The number of threads."""
        with self._lock:
            return len(self._threads)

    def run(self, calls: Sequence[Callable[[], T]], abandon: Callable[[], object] = lambda: None) -> list[T]:
        """Makes calls at the same time, and waits for all of them.

        Args:
            calls: the calls, at least one. The last one is made on this thread.
            abandon: called if an error such as KeyboardInterrupt interrupts this thread while others make calls. It
                must end those calls, because `run` waits for them before it raises that error.

        Returns:
            The results, in the order of the calls.

        Raises:
            Cancelled: `close` was called before.
            Exception: the first error in the order of the calls. It is raised when all calls have ended.
        """
        if self._closed:
            raise errors.Cancelled("the client was closed")
        if len(calls) == 1:
            return [calls[0]()]
        futures = [Future[T]() for _ in calls]
        begun: list[Future[T]] = []
        # No call of this step may still run when the next step starts, even if one raises, or Ctrl-C interrupts.
        try:
            own: list[_Task] = []
            for call, future in zip(calls[:-1], futures, strict=False):
                if self._begin(partial(_perform, call, future)):
                    begun.append(future)
                else:
                    own.append(partial(_perform, call, future, Exception))
            own.append(partial(_perform, calls[-1], futures[-1], Exception))
            for task in own:
                task()
            for future in begun:
                future.exception()
        except BaseException:
            abandon()
            wait(begun)
            raise
        del begun, call, future, own, task
        # The list is emptied, because a failure's traceback refers to this frame: a cycle with a failure would keep its
        # memory, such as shared memory, until the next garbage collection.
        try:
            return [futures.pop(0).result() for _ in calls]
        finally:
            futures.clear()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        """Begins a call on a thread. The thread does not keep the program from its end, unlike one of an executor.

        Args:
            call: the call.

        Returns:
            Its future result.

        Raises:
            RuntimeError: the system does not allow this process another thread.
        """
        future: Future[T] = Future()
        if not self._begin(partial(_perform, call, future)):
            raise RuntimeError("the system does not allow this process another thread")
        return future

    def close(self) -> None:
        """Ends the threads, and waits until their calls have returned."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            threads = [*self._threads]
        for inbox in idle:
            inbox.put(None)
        for thread in threads:
            thread.join()

    def _begin(self, task: _Task) -> bool:
        """Gives a task to a thread. Returns False if the system does not allow this process another thread."""
        with self._lock:
            if self._idle:
                self._idle.pop().put(task)
                return True
            inbox: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
            inbox.put(task)  # not as an argument, which the thread would keep
            thread = threading.Thread(target=self._work, args=(inbox,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._threads.add(thread)
            return True

    def _work(self, inbox: "queue.SimpleQueue[_Task | None]") -> None:
        task = inbox.get()
        while task:
            task()
            task = None  # it refers to the memory of its call
            with self._lock:
                if self._closed:
                    break
                self._idle.append(inbox)
            task = self._next(inbox)
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _next(self, inbox: "queue.SimpleQueue[_Task | None]") -> _Task | None:
        """Waits for the next task of an idle thread; None means that the thread ends."""
        try:
            return inbox.get(timeout=self._idle_s)
        except queue.Empty:
            with self._lock:
                if inbox in self._idle:
                    self._idle.remove(inbox)
                    return None
        return inbox.get()  # it was taken from the list meanwhile, so a task arrives


def _perform(call: Callable[[], T], future: "Future[T]", caught: type[BaseException] = BaseException) -> None:
    try:
        future.set_result(call())
    except caught as error:  # `run` raises it
        future.set_exception(error)
        del future  # the error's traceback refers to this frame: a cycle


__all__ = ["CallThreads"]
