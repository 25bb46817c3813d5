"""Scheduler of one run: simulated time, and coroutines that belong to processes.

All that happens is an entry of one heap, in order of its time. Entries at the same time keep the order in which they
were made. A process that is stopped (SIGSTOP) gets its entries when it goes on, and one that was killed never.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from shoal import errors

T = TypeVar("T")


class Future(Generic[T]):
    """A result that comes later. A coroutine that awaits it goes on when it is there."""

    __slots__ = ("_calls", "done", "error", "value")

    def __init__(self) -> None:
        self.done = False
        self.value: T | None = None
        self.error: BaseException | None = None
        self._calls: list[Callable[[], object]] = []

    def set(self, value: T) -> None:
        """Sets the result, unless there is one."""
        if not self.done:
            self.done, self.value = True, value
            self._tell()

    def fail(self, error: BaseException) -> None:
        """Sets an error, unless there is a result."""
        if not self.done:
            self.done, self.error = True, error
            self._tell()

    def then(self, call: Callable[[], object]) -> None:
        """Calls a function when the result is there, or now."""
        if self.done:
            call()
        else:
            self._calls.append(call)

    def result(self) -> T:
        """Returns the result, which is there, or raises its error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # it is set

    def __await__(self) -> Generator["Future[Any]", None, T]:
        if not self.done:
            yield self
        return self.result()

    def _tell(self) -> None:
        calls, self._calls = self._calls, []
        for call in calls:
            call()


@dataclass(eq=False)
class Life:
    """One process: from its start to its end.

    Attributes:
        name: name of the machine.
        number: number of the process, unique in the run.
        alive: whether it has not ended.
        stopped_until: when it goes on, if it is stopped.
        tasks: its coroutines, in the order in which they began.
        on_end: called when it ends: connections break.
    """

    name: str
    number: int
    alive: bool = True
    stopped_until: float = 0.0
    tasks: dict["Task", None] = field(default_factory=dict)
    on_end: dict[Callable[[], object], None] = field(default_factory=dict)

    def end(self) -> None:
        """Ends the process, as SIGKILL does."""
        if not self.alive:
            return
        self.alive = False
        tasks, self.tasks = list(self.tasks), {}
        for task in tasks:
            task.cancel()
        calls, self.on_end = list(self.on_end), {}
        for call in calls:
            call()


class Task:
    """A coroutine of a process."""

    __slots__ = ("_coroutine", "_life", "_scheduler", "_waits_for", "result")

    def __init__(self, scheduler: "Scheduler", life: Life, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._scheduler, self._life, self._coroutine = scheduler, life, coroutine
        self._waits_for: Future[Any] | None = None
        self.result: Future[Any] = Future()

    def step(self) -> None:
        """Goes on to the next wait, or to the end."""
        life, scheduler = self._life, self._scheduler
        if self not in life.tasks:
            return
        if life.stopped_until > scheduler.now:
            scheduler.at(life.stopped_until, self.step)
            return
        try:
            self._waits_for = self._coroutine.send(None)
        except StopIteration as end:
            del life.tasks[self]
            self.result.set(end.value)
        except errors.ShoalError as error:
            life.tasks.pop(self, None)
            self.result.fail(error)
        else:
            self._waits_for.then(self.wake)

    def wake(self) -> None:
        """Lets the scheduler call `step`."""
        self._scheduler.ready.append(self.step)

    def cancel(self) -> None:
        """Ends the coroutine at its wait."""
        self._life.tasks.pop(self, None)
        self._coroutine.close()


class Scheduler:
    """The time and the entries of one run.

    Args:
        seed: decides all that is random.
        after_each: called after each entry, and may raise an error.

    Attributes:
        now: seconds since the beginning.
        random: the only source of random numbers.
        ready: what goes on at this time.
        events: number of entries so far.
        log: takes a line for people; None if nobody reads it.
    """

    def __init__(self, seed: int, after_each: Callable[[], object] = bool) -> None:
        self.log: Callable[[str], object] | None = None
        self.now = 0.0
        self.random = random.Random(seed)
        self.ready: deque[Callable[[], object]] = deque()
        self.events = self._entries = 0
        self._lives: list[Life] = []
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._after_each = after_each

    def tell(self, what: str, *about: object) -> None:
        """Logs what happens."""
        if self.log:
            self.log(f"{self.now:9.4f}  {what}  {' '.join(map(str, about))}")

    def new_life(self, name: str) -> Life:
        """Starts a process."""
        self._lives.append(Life(name, len(self._lives) + 1))
        return self._lives[-1]

    def close(self) -> None:
        """Ends all coroutines."""
        for life in self._lives:
            for task in list(life.tasks):
                task.cancel()

    def at(self, time: float, call: Callable[[], object]) -> None:
        """Calls a function at a time."""
        self._entries += 1
        heapq.heappush(self._heap, (max(time, self.now), self._entries, call))

    def after(self, seconds: float, call: Callable[[], object]) -> None:
        """Calls a function after some seconds."""
        self.at(self.now + seconds, call)

    def sleep(self, seconds: float) -> Future[None]:
        """Returns what is there after some seconds."""
        slept: Future[None] = Future()
        self.after(seconds, lambda: slept.set(None))
        return slept

    def spawn(self, life: Life, coroutine: Coroutine[Any, Any, T]) -> Task:
        """Begins a coroutine of a process."""
        task = Task(self, life, coroutine)
        if life.alive:
            life.tasks[task] = None
            self.ready.append(task.step)
        else:
            coroutine.close()
        return task

    def run(self, until: Callable[[], bool], limit_s: float) -> bool:
        """Runs until a condition holds, at most to a time. Returns whether it holds."""
        while not until():
            while self.ready:
                self.ready.popleft()()
            if not self._heap or self._heap[0][0] > limit_s:
                return until()
            self.now, _, call = heapq.heappop(self._heap)
            self.events += 1
            call()
            while self.ready:
                self.ready.popleft()()
            self._after_each()
        return True


async def all_of(futures: Iterable[Future[T]]) -> list[T]:
    """Waits for all, and returns their results, or raises the first error in their order."""
    waited = list(futures)
    for future in waited:
        if not future.done:
            await _settled(future)
    return [future.result() for future in waited]


def _settled(future: Future[Any]) -> Future[None]:
    settled: Future[None] = Future()
    future.then(lambda: settled.set(None))
    return settled


__all__ = ["Future", "Life", "Scheduler", "Task", "all_of"]
