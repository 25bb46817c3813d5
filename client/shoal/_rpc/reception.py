"""The reception of a server's calls: a call gets a thread when its first message is complete, within limits.

An unmodified grpcio server gives a call a thread when its headers arrive, and the thread waits for the message. So
calls that send headers but never a message can take all threads. This module first receives the message, which needs no
thread, and then passes the call to its thread pool. For this it uses private names of grpcio's `_server` module. No
other module does so. The import checks whether the installed grpcio has these names in the expected form. If it does
not, a call gets its thread when its headers arrive, as in unmodified grpcio, and a contract test fails
(docs/decisions/0044-calls-get-a-thread-with-their-message.md).
"""

import importlib
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

import structlog

from shoal import errors
from shoal._rpc.call_limits import REFUSALS, CallLimits, Refusal
from shoal._rpc.callers import set_caller
from shoal._security import Authorizer, Principal, token_in

_log = structlog.get_logger(__name__)
_grpc: Any = importlib.import_module("grpc._server")
_cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")

# What `submit` gets from grpcio, after the function that runs a call in its context.
_ARGUMENTS = ["rpc_event", "state", "behavior", "argument_thunk", "request_deserializer", "response_serializer"]
_NAMES = ("_receive_message", "_abort", "_is_rpc_state_active", "_RECEIVE_MESSAGE_TOKEN", "_EMPTY_FLAGS")

# Seconds between two checks for late messages.
_LATE_POLL_S = 1.0

# Lets a call wait. Takes its first message and a function to call when the wait ends. Returns a function to call if the
# caller ends, or None if the call need not wait: it is then handled at once.
Hold = Callable[[Any, Callable[[], None]], Callable[[], None] | None]


def is_supported() -> bool:
    """Returns whether this version of grpcio has the private names that this module uses."""
    if not all(hasattr(_grpc, name) for name in _NAMES) or not hasattr(_cygrpc, "ReceiveMessageOperation"):
        return False
    responders = (getattr(_grpc, f"_{kind}_response_in_pool", None) for kind in ("unary", "stream"))
    return all(responder and list(inspect.signature(responder).parameters) == _ARGUMENTS for responder in responders)


_SUPPORTED = is_supported()


class Reception:
    """The reception of one server. Thread-safe.

    Essential and ordinary calls are counted separately, so ordinary calls never use up the limits of essential ones.

    Args:
        limits: the limits. They apply to ordinary calls and, separately, to essential ones.
        refusal: encodes an error for `_abort`: its status, text and trailing metadata.
        authorizer: decides on each call before its message is received. None allows all calls.
        clock: monotonic clock, in seconds.

    Raises:
        StartFailed: calls need authorization, which the installed grpcio does not allow before their message.
    """

    def __init__(
        self,
        limits: CallLimits,
        refusal: Callable[[errors.ShoalError], tuple[Any, bytes, Any]],
        authorizer: Authorizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if authorizer and not _SUPPORTED:
            raise errors.StartFailed("this version of grpcio cannot refuse calls before their message; install 1.85")
        self._limits, self._refusal, self._authorizer, self._clock = limits, refusal, authorizer, clock
        self._lock = threading.Lock()  # guards what follows; nothing is called under it
        self._calls: Counter[tuple[bool, bytes]] = Counter()  # by whether they are essential, and by host
        self._totals = {False: 0, True: 0}
        self._expected: dict[_Call, float] = {}  # calls without a message, in order of arrival, and since when
        self._queued: dict[_Call, float] = {}  # essential calls that wait for a thread, and since when
        self._longest_wait_s, self._essential_refused = 0.0, 0  # since they were last taken
        self._refused: Counter[Refusal] = Counter()
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._end_late_calls, name="late-calls", daemon=True)

    def start(self) -> None:
        """Starts to end calls whose message is late."""
        if not _SUPPORTED:
            _log.error("this version of grpcio gives calls a thread before their message", fix="install grpcio 1.85")
        self._watch.start()

    def stop(self) -> None:
        """Ends the thread that looks for late messages."""
        self._stopped.set()
        if self._watch.is_alive():
            self._watch.join()

    @property
    def refused(self) -> Mapping[Refusal, int]:
        """The number of refused calls by reason."""
        with self._lock:
            return {reason: self._refused[reason] for reason in REFUSALS}

    @property
    def waiting(self) -> int:
        """The number of calls whose message has not arrived."""
        with self._lock:
            return len(self._expected)

    def take_essential_delays(self) -> tuple[float, int]:
        """Returns the delays and refusals of essential calls since this method was last called.

        Returns:
            The longest wait for a thread in seconds, and the number of refused calls.
        """
        now = self._clock()
        with self._lock:
            oldest = next(iter(self._queued.values()), now)
            delays = max(self._longest_wait_s, now - oldest), self._essential_refused
            self._longest_wait_s, self._essential_refused = 0.0, 0
        return delays

    def pool(
        self, name: str, threads: ThreadPoolExecutor, *, streaming: bool, essential: bool, hold: Hold | None = None
    ) -> ThreadPoolExecutor:
        """Returns the pool to give to grpcio for a method: it receives the first message, then uses `threads`.

        Args:
            name: SERVICE/METHOD.
            threads: the threads on which the method runs.
            streaming: whether its requests are streams.
            essential: whether its calls are essential.
            hold: lets each call wait before the method runs. None means that calls do not wait.

        Returns:
            The pool.
        """
        if not _SUPPORTED:
            return threads
        return _ReceivingPool(self, name, threads, streaming=streaming, essential=essential, hold=hold)

    def authorize(self, name: str, metadata: Any) -> Principal | None:
        """Returns who makes a call.

        Args:
            name: SERVICE/METHOD.
            metadata: metadata of the call.

        Raises:
            Unauthenticated, Forbidden, Unreachable: see `Authorizer.authorize`; the first two are counted.
        """
        if self._authorizer is None:
            return None
        try:
            return self._authorizer.authorize(name, token_in(metadata))
        except (errors.Unauthenticated, errors.Forbidden) as error:
            with self._lock:
                self._refused["forbidden" if isinstance(error, errors.Forbidden) else "unauthenticated"] += 1
            raise

    def admit(self, call: "_Call") -> None:
        """Counts a call.

        Raises:
            Overloaded: there are too many calls, in all or of its host.
        """
        key = call.essential, call.host
        with self._lock:
            if self._totals[call.essential] >= self._limits.calls:
                self._refused["calls"] += 1
                what, limit = "this server has", self._limits.calls
            elif self._calls[key] >= self._limits.host_calls:
                self._refused["calls_of_host"] += 1
                what, limit = f"{call.host.decode(errors='replace')} has", self._limits.host_calls
            else:
                self._totals[call.essential] += 1
                self._calls[key] += 1
                self._expected[call] = self._clock()
                return
            self._essential_refused += call.essential
        raise errors.Overloaded(f"{what} {limit} calls at a time, the maximum; try again later", calls=limit)

    def arrived(self, call: "_Call") -> None:
        """Notes that a call's message has arrived, or will not."""
        with self._lock:
            self._expected.pop(call, None)
            if call.essential:
                self._queued[call] = self._clock()

    def began(self, call: "_Call") -> None:
        """Notes that a call got its thread."""
        if call.essential:
            now = self._clock()
            with self._lock:
                self._longest_wait_s = max(self._longest_wait_s, now - self._queued.pop(call, now))

    def ended(self, call: "_Call") -> None:
        """Notes the end of an admitted call."""
        key = call.essential, call.host
        with self._lock:
            self._queued.pop(call, None)
            self._totals[call.essential] -= 1
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]

    def end_late(self) -> int:
        """Ends the calls whose first message is late, and returns their number."""
        latest = self._clock() - self._limits.message_s
        late: list[_Call] = []
        with self._lock:
            for call, since in self._expected.items():
                if since > latest:
                    break
                late.append(call)
            for call in late:
                del self._expected[call]
            self._refused["late_message"] += len(late)
        error = errors.DeadlineExceeded(
            f"the call sent no message within {self._limits.message_s:g} s of its headers; repeat the call, and send "
            "its message at once"
        )
        for call in late:
            self.abort(call, error)
        return len(late)

    def abort(self, call: "_Call", error: errors.ShoalError) -> None:
        """Ends a call with an error."""
        code, text, metadata = self._refusal(error)
        with call.state.condition:
            if _grpc._is_rpc_state_active(call.state):
                call.state.trailing_metadata = metadata
                _grpc._abort(call.state, call.event.call, code, text)

    def _end_late_calls(self) -> None:
        while not self._stopped.wait(_LATE_POLL_S):
            try:
                if ended := self.end_late():
                    _log.warning("ended calls whose message did not arrive", calls=ended)
            except Exception:
                _log.exception("cannot end late calls")


class _Call:
    """A call between its headers and its thread.

    Attributes:
        event: grpcio's event of its headers.
        state: grpcio's state of it.
        host: where it comes from, without the port.
        essential: whether it is essential.
        ended: finished when the call no longer counts; grpcio counts its calls by it.
    """

    __slots__ = ("ended", "essential", "event", "host", "state")

    def __init__(self, event: Any, state: Any, *, essential: bool) -> None:
        self.event, self.state, self.essential = event, state, essential
        peer = event.call.peer()
        self.host: bytes = peer.rpartition(b":")[0]
        self.ended: Future[None] = Future()


class _ReceivingPool(ThreadPoolExecutor):
    """What grpcio takes for a method's pool. It has no thread of its own: `submit` receives the call's first message.

    grpcio runs handlers only in instances of ThreadPoolExecutor.
    """

    def __init__(
        self,
        reception: Reception,
        name: str,
        threads: ThreadPoolExecutor,
        *,
        streaming: bool,
        essential: bool,
        hold: Hold | None,
    ) -> None:
        super().__init__(1)
        self._reception, self._name, self._pool, self._hold = reception, name, threads, hold
        self._streaming, self._essential = streaming, essential

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        """Receives a call. grpcio calls it on its event thread, with the lock of the call's state."""
        _respond, event, state, _behavior, _argument, deserializer, _serializer = args
        call = _Call(event, state, essential=self._essential)
        try:
            state.context.run(set_caller, self._reception.authorize(self._name, event.invocation_metadata))
            self._reception.admit(call)
        except errors.ShoalError as refused:
            self._reception.abort(call, refused)
            call.ended.set_result(None)
            return call.ended
        receive = _grpc._receive_message(state, event.call, deserializer)

        def arrived(message: Any) -> Any:
            result = receive(message)  # decodes the message, and puts it in the state
            self._reception.arrived(call)
            try:
                self._go_on(call, fn, args)
            except Exception:  # the event thread must survive
                _log.exception("cannot run a call")
                self._end(call)
            return result

        event.call.start_server_batch((_cygrpc.ReceiveMessageOperation(_grpc._EMPTY_FLAGS),), arrived)
        state.due.add(_grpc._RECEIVE_MESSAGE_TOKEN)
        return call.ended

    def _go_on(self, call: _Call, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        respond, event, state, behavior, argument, *codecs = args
        with state.condition:
            request, state.request = state.request, None
            runs = _grpc._is_rpc_state_active(state) and (request is not None or self._streaming)
        if not runs:
            self._reception.abort(call, errors.BadRequest("the call ended without a message"))
            self._end(call)
            return
        if not self._streaming:
            received = lambda: request  # noqa: E731 - the thunk that grpcio calls
        elif request is None:  # an empty stream
            received = argument
        else:
            received = lambda: chain((request,), argument())  # noqa: E731
        run = partial(self._run, call, fn, respond, event, state, behavior, received, *codecs)
        if self._hold is None:
            self._submit(call, run)
        else:
            self._submit(call, partial(self._wait, call, self._hold, request, run))

    def _submit(self, call: _Call, run: Callable[[], None]) -> None:
        try:
            self._pool.submit(run)
        except RuntimeError:  # the pool is shut down
            self._reception.abort(call, errors.Unreachable("the server is stopping"))
            self._end(call)

    def _wait(self, call: _Call, hold: Hold, request: Any, run: Callable[[], None]) -> None:
        """Lets a call wait. It holds no thread while it waits, but counts as a call."""
        runs = [run]

        def go_on() -> None:
            with suppress(IndexError):  # a second time does nothing
                self._submit(call, partial(self._run_if_active, call, runs.pop()))

        try:
            # In a copy, because the handler may begin on another thread before `hold` returns.
            gone = call.state.context.copy().run(hold, request, go_on)
        except Exception:
            _log.exception("cannot let a call wait")
            go_on()
            return

        if gone is None:
            run()
            return

        def call_gone() -> None:  # on grpcio's event thread, which must not wait for a lock
            with suppress(RuntimeError):  # the pool is shut down
                self._pool.submit(gone)

        with call.state.condition:
            if waits := call.state.callbacks is not None:
                call.state.callbacks.append(call_gone)
        if not waits:  # the call has ended meanwhile
            gone()

    def _run_if_active(self, call: _Call, run: Callable[[], None]) -> None:
        with call.state.condition:
            active = _grpc._is_rpc_state_active(call.state)
        if active:
            run()
        else:
            self._end(call)

    def _run(self, call: _Call, fn: Callable[..., Any], *args: Any) -> None:
        self._reception.began(call)
        try:
            fn(*args)
        finally:
            self._end(call)

    def _end(self, call: _Call) -> None:
        self._reception.ended(call)
        call.ended.set_result(None)


__all__ = ["Hold", "Reception", "is_supported"]
