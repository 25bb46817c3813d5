"""Network of one run: calls between processes, which are lost, late, doubled or reordered, and partitions.

A call goes to the process that listens under a name when it is sent: it never reaches a later process. As over gRPC,
the caller gets an answer, an error, or nothing until its deadline. A call that its caller has abandoned may still be
executed later, and a doubled one is executed twice.
"""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from shoal import errors
from simulation.scheduler import Future, Life, Scheduler

# Seconds until a caller learns that nobody listens, or that the process that it called has ended.
REFUSED_S = 0.01
# Seconds until a machine notices that the other end of a connection cannot be reached any more.
KEEPALIVE_S = 4.0


@dataclass(eq=False)
class Context:
    """What a called process knows of its caller.

    Attributes:
        active: whether the caller may still wait for the answer.
        on_cancel: called when the process learns that it does not.
    """

    active: bool = True
    on_cancel: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Tells the called process that its caller has gone."""
        if self.active:
            self.active = False
            if self.on_cancel:
                self.on_cancel()


class Listener(Protocol):
    """What can be called: a process with a handler."""

    life: Life | None

    def serve(self, request: Any, context: Context) -> Coroutine[Any, Any, Any]:
        """Answers a call, or raises an error."""
        ...


@dataclass(frozen=True)
class Weather:
    """How bad the network is.

    Attributes:
        delay_s: mean delay of a message.
        lost: share of the requests that are lost.
        lost_replies: share of the replies that are lost.
        doubled: share of the requests that arrive twice.
        late: share of the messages that take `late_s` at most.
        late_s: seconds.
    """

    delay_s: float = 0.002
    lost: float = 0.0
    lost_replies: float = 0.0
    doubled: float = 0.0
    late: float = 0.0
    late_s: float = 0.0


class Network:
    """The network.

    Args:
        scheduler: the time.
        weather: how bad the network is until `calm`.
    """

    def __init__(self, scheduler: Scheduler, weather: Weather) -> None:
        self._scheduler, self._weather = scheduler, weather
        self._listeners: dict[str, Listener] = {}
        self._cuts: dict[int, tuple[frozenset[str], frozenset[str]]] = {}
        self._made = 0

    def listen(self, name: str, listener: Listener) -> None:
        """Gives a listener a name."""
        self._listeners[name] = listener

    def calm(self) -> None:
        """Ends the bad weather and all partitions."""
        self._weather, self._cuts = Weather(), {}

    def cut(self, some: frozenset[str], others: frozenset[str]) -> Callable[[], object]:
        """Lets no message pass between two groups of machines. Returns what ends that."""
        self._made += 1
        made = self._made
        self._cuts[made] = some, others
        return lambda: self._cuts.pop(made, None)

    def connected(self, one: str, other: str) -> bool:
        """Returns whether messages pass between two machines."""
        return not any(
            (one in some and other in others) or (other in some and one in others)
            for some, others in self._cuts.values()
        )

    def call(self, caller: Life, name: str, request: Any, *, timeout_s: float) -> Future[Any]:
        """Makes a call.

        Args:
            caller: the process that calls.
            name: the name of the called machine.
            request: the request, which nobody changes.
            timeout_s: seconds until the caller gives up.

        Returns:
            The answer, or a ShoalError.
        """
        scheduler, weather, random = self._scheduler, self._weather, self._scheduler.random
        answer: Future[Any] = Future()
        listener = self._listeners[name]
        called = listener.life
        scheduler.after(timeout_s, lambda: answer.fail(errors.DeadlineExceeded(f"{name} took too long")))
        if not self.connected(caller.name, name):
            self._break(answer, f"no way to {name}")
            return answer
        if called is None or not called.alive:
            scheduler.after(REFUSED_S, lambda: answer.fail(errors.Unreachable(f"nobody listens at {name}")))
            return answer
        if random.random() < weather.lost:
            self._break(answer, f"{name}: connection reset")
            return answer

        def broken() -> None:
            if self.connected(caller.name, name):
                scheduler.after(REFUSED_S, lambda: answer.fail(errors.Unreachable(f"{name} has ended")))

        called.on_end[broken] = None
        answer.then(lambda: called.on_end.pop(broken, None))
        self._deliver(caller, called, listener, request, answer)
        if random.random() < weather.doubled:
            self._deliver(caller, called, listener, request, None)
        return answer

    def _deliver(
        self, caller: Life, called: Life, listener: Listener, request: Any, answer: Future[Any] | None
    ) -> None:
        """Executes a call once. Without an answer it is a copy that the network has made."""
        scheduler = self._scheduler
        context = Context()
        self._watch(caller, called, context, answer)

        def arrive() -> None:
            if not called.alive:
                return
            if not self.connected(caller.name, called.name):
                if answer is not None:
                    self._break(answer, f"{called.name}: connection broken")
                return
            if answer is not None and answer.error is not None:
                context.cancel()  # TCP keeps the order: the end of a call comes right behind its request
            if scheduler.log:
                copy = "" if answer is not None else " (a copy)"
                scheduler.tell(f"{caller.name} -> {called.name}{copy}:", request)
            task = scheduler.spawn(called, listener.serve(request, context))
            if answer is not None:
                task.result.then(lambda: self._reply(caller, called, task.result, answer))

        scheduler.after(self.delay(), arrive)

    def _watch(self, caller: Life, called: Life, context: Context, answer: Future[Any] | None) -> None:
        """Tells the called process when its caller has abandoned the call, or has ended."""

        def tell() -> None:
            caller.on_end.pop(tell, None)
            seconds = self.delay() if self.connected(caller.name, called.name) else KEEPALIVE_S
            self._scheduler.after(seconds, lambda: context.cancel() if called.alive else None)

        if answer is None:  # a copy: its connection soon breaks
            tell()
            return
        caller.on_end[tell] = None
        answer.then(lambda: tell() if answer.error is not None else caller.on_end.pop(tell, None))

    def _reply(self, caller: Life, called: Life, result: Future[Any], answer: Future[Any]) -> None:
        scheduler, random = self._scheduler, self._scheduler.random
        if random.random() < self._weather.lost_replies:
            self._break(answer, f"{called.name}: connection reset")
            return

        def arrive() -> None:
            if not self.connected(caller.name, called.name):
                self._break(answer, f"{called.name}: connection broken")
                return
            if scheduler.log and not answer.done:
                scheduler.tell(f"{called.name} answers {caller.name}:", repr(result.error or result.value))
            if result.error is not None:
                answer.fail(result.error)
            else:
                answer.set(result.value)

        scheduler.after(self.delay(), arrive)

    def _break(self, answer: Future[Any], why: str) -> None:
        """Lets a caller know that its connection is broken: soon, or when it notices the silence."""
        seconds = self.delay() if self._scheduler.random.random() < 0.5 else KEEPALIVE_S
        self._scheduler.after(seconds, lambda: answer.fail(errors.Unreachable(why)))

    def delay(self) -> float:
        """Returns the seconds that the next message takes."""
        weather, random = self._weather, self._scheduler.random
        if weather.late and random.random() < weather.late:
            return random.random() * weather.late_s
        return weather.delay_s * (0.2 + random.random())


__all__ = ["KEEPALIVE_S", "REFUSED_S", "Context", "Listener", "Network", "Weather"]
