"""The reception of a server's calls: a call gets a thread when its first message is complete, within limits.

An unmodified grpcio server gives a call a thread when its headers arrive, and the thread waits for the message. So
calls that send headers but never a message can take all threads. This module first receives the message, which needs no
thread, and then passes the call to its thread pool. For this it uses private names of grpcio's `_server` module. No
other module does so. The import checks whether the installed grpcio has these names in the expected form. If it does
not, a call gets its thread when its headers arrive, as in unmodified grpcio, and a contract test fails
(docs/decisions/0044-calls-get-a-thread-with-their-message.md). A server that checks tokens then does not start.
"""

import importlib
import inspect
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import chain
from typing import Any

from shoal import errors
from shoal._rpc.call_limits import CallLimits
from shoal._rpc.callers import set_caller
from shoal._rpc.calls import Call, host_of, size_of
from shoal._rpc.outcomes import CallOutcome, OnOutcome
from shoal._security import Authorizer, Principal, token_in
from shoal._system import resident_bytes
from shoal._system.logs import Log

_log = Log(__name__)
_grpc: Any = importlib.import_module("grpc._server")
_cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")

# What `submit` gets from grpcio, after the function that runs a call in its context.
_ARGUMENTS = ["rpc_event", "state", "behavior", "argument_thunk", "request_deserializer", "response_serializer"]
_NAMES = ("_receive_message", "_abort", "_is_rpc_state_active", "_RECEIVE_MESSAGE_TOKEN", "_EMPTY_FLAGS")

# Seconds between two checks for late messages, and of the memory of the process.
_LATE_POLL_S = 0.5

# Lets a call wait. Takes the call's first message, and a function to call when the wait ends. Returns the function to
# call if the caller ends the call. Returns None if the call need not wait: it is then handled at once.
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
        limits: the limits.
        refusal: encodes an error for `_abort`: its status, text and trailing metadata.
        authorizer: decides on each call before its message is received. None allows all calls.
        on_outcome: called with each call that `authorizer` refuses.
        clock: monotonic clock, in seconds.
        resident: returns the bytes of memory that the process has.

    Raises:
        StartFailed: calls need authorization, but the installed grpcio cannot refuse a call before its message arrives.
    """

    def __init__(
        self,
        limits: CallLimits,
        refusal: Callable[[errors.ShoalError], tuple[Any, bytes, Any]],
        authorizer: Authorizer | None = None,
        on_outcome: OnOutcome = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        resident: Callable[[], int] = resident_bytes,
    ) -> None:
        if authorizer and not _SUPPORTED:
            raise errors.StartFailed(
                "this grpcio cannot refuse calls before their messages arrive; install grpcio 1.85"
            )
        self._limits, self._refusal, self._clock, self._resident = limits, refusal, clock, resident
        self._authorizer, self._on_outcome = authorizer, on_outcome
        self._lock = threading.Lock()  # guards what follows; nothing is called under it
        self._calls: Counter[tuple[bool, bytes]] = Counter()  # by whether they are essential, and by host
        self._totals = {False: 0, True: 0}
        self._received = {False: 0, True: 0}  # bytes of messages that wait for a thread
        self._expected: dict[Call, float] = {}  # calls without a message, in order of arrival, and since when
        self._queued: dict[Call, float] = {}  # essential calls that wait for a thread, and since when
        self._longest_wait_s, self._essential_refused = 0.0, 0  # since they were last taken
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._end_late_calls, name="late-calls", daemon=True)

    def start(self) -> None:
        """Starts to end calls whose message is late."""
        if not _SUPPORTED:
            _log.error("this grpcio gives calls a thread before their messages arrive", fix="install grpcio 1.85")
        self._watch.start()

    def stop(self) -> None:
        """Ends the thread that looks for late messages."""
        self._stopped.set()
        if self._watch.is_alive():
            self._watch.join()

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

    def authorize(self, name: str, event: Any) -> Principal | None:
        """Returns who makes the call `name`, from grpcio's event of its headers. Raises as `Authorizer.authorize`."""
        allow, token = self._authorizer, token_in(event.invocation_metadata)
        who: list[Principal] = []
        try:
            return allow.authorize(name, token, lambda: _certificate(event.call), who.append) if allow else None
        except errors.ShoalError as why:
            self._on_outcome(CallOutcome(name, next(iter(who), None), host_of(event), why.status, reason=why.message))
            raise

    def admit(self, call: Call) -> errors.ShoalError | None:
        """Counts a call, or returns why it is refused."""
        key = call.essential, call.host
        with self._lock:
            refused = self._limits.too_many(call.host, self._calls[key], self._totals[call.essential])
            if refused is None:
                self._totals[call.essential] += 1
                self._calls[key] += 1
                self._expected[call] = self._clock()
            else:
                self._essential_refused += call.essential
        return refused

    def arrived(self, call: Call, nbytes: int) -> errors.ShoalError | None:
        """Notes that a call's message has arrived or will not arrive. Returns why the message is refused, or None."""
        with self._lock:
            self._expected.pop(call, None)
            if refused := self._limits.too_large(nbytes, self._received[call.essential]):
                return refused
            call.nbytes = nbytes
            self._received[call.essential] += nbytes
            if call.essential:
                self._queued[call] = self._clock()
        return None

    def began(self, call: Call) -> None:
        """Notes that a call got its thread."""
        now = self._clock()
        with self._lock:
            self._free(call)
            if call.essential:
                self._longest_wait_s = max(self._longest_wait_s, now - self._queued.pop(call, now))

    def ended(self, call: Call) -> None:
        """Notes the end of an admitted call."""
        key = call.essential, call.host
        with self._lock:
            self._free(call)
            self._queued.pop(call, None)
            self._totals[call.essential] -= 1
            self._calls[key] -= 1
            if not self._calls[key]:
                del self._calls[key]

    def end_late(self) -> int:
        """Ends the calls whose first message is late, and returns their number."""
        latest = self._clock() - self._limits.message_s
        late: list[Call] = []
        with self._lock:
            for call, since in self._expected.items():
                if since > latest:
                    break
                late.append(call)
            for call in late:
                del self._expected[call]
        for call in late:
            self.abort(call, self._limits.late())
        return len(late)

    def end_for_memory(self) -> int:
        """Ends ordinary calls whose first message has not arrived if the process uses too much memory.

        Parts of their messages may take much memory. New calls are not refused, so the role stays reachable even if the
        process continues to use much memory.

        Returns:
            The number of ended calls.
        """
        resident = self._resident()
        if resident <= self._limits.memory_bytes:
            return 0
        with self._lock:
            ended = [call for call in self._expected if not call.essential]
            for call in ended:
                del self._expected[call]
        for call in ended:
            self.abort(call, self._limits.no_memory(resident))
        return len(ended)

    def _free(self, call: Call) -> None:
        """Notes that a call's message no longer waits. Called with the lock."""
        self._received[call.essential] -= call.nbytes
        call.nbytes = 0

    def abort(self, call: Call, error: errors.ShoalError) -> None:
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
                if ended := self.end_for_memory():
                    _log.warning("ended calls without a message, because the process uses too much memory", calls=ended)
            except Exception:
                _log.exception("cannot end late calls")


def _certificate(call: Any) -> bytes:
    """Returns the verified certificate of a call's client as PEM; empty if there is none."""
    return bytes(((_cygrpc.auth_context(call) or {}).get(b"x509_pem_cert") or [b""])[0])


class _ReceivingPool(ThreadPoolExecutor):
    """The pool that grpcio uses for a method. It starts no thread: `submit` receives the first message of a call.

    It is a ThreadPoolExecutor because grpcio accepts no other pool.
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
        call = Call(event, state, essential=self._essential)
        try:
            state.context.run(set_caller, self._reception.authorize(self._name, event))
            refused = self._reception.admit(call)
        except errors.ShoalError as error:
            refused = error
        if refused:
            self._reception.abort(call, refused)
            call.ended.set_result(None)
            return call.ended
        receive = _grpc._receive_message(state, event.call, deserializer)

        def arrived(message: Any) -> Any:
            result = receive(message)  # decodes the message, and puts it in the state
            try:
                if refused := self._reception.arrived(call, size_of(state.request)):
                    state.request = None
                    self._reception.abort(call, refused)
                    self._end(call)
                else:
                    self._continue_call(call, fn, args)
            except Exception:  # the event thread must survive
                _log.exception("cannot run a call")
                self._end(call)
            return result

        event.call.start_server_batch((_cygrpc.ReceiveMessageOperation(_grpc._EMPTY_FLAGS),), arrived)
        state.due.add(_grpc._RECEIVE_MESSAGE_TOKEN)
        return call.ended

    def _continue_call(self, call: Call, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
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

    def _submit(self, call: Call, run: Callable[[], None]) -> None:
        try:
            self._pool.submit(run)
        except RuntimeError:  # the pool is shut down
            self._reception.abort(call, errors.Unreachable("the server is stopping"))
            self._end(call)

    def _wait(self, call: Call, hold: Hold, request: Any, run: Callable[[], None]) -> None:
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

    def _run_if_active(self, call: Call, run: Callable[[], None]) -> None:
        with call.state.condition:
            active = _grpc._is_rpc_state_active(call.state)
        if active:
            run()
        else:
            self._end(call)

    def _run(self, call: Call, fn: Callable[..., Any], *args: Any) -> None:
        self._reception.began(call)
        try:
            fn(*args)
        finally:
            self._end(call)

    def _end(self, call: Call) -> None:
        self._reception.ended(call)
        call.ended.set_result(None)


__all__ = ["Hold", "Reception", "is_supported"]
