"""The pool that receives the first message of a call before it gives the call a thread of another pool.

For this it uses private names of grpcio's `_server` module. No other module does so. The import checks whether the
installed grpcio has these names in the expected form. If it does not, a call gets its thread when its headers arrive,
as in unmodified grpcio, and a contract test fails (docs/decisions/0044-calls-get-a-thread-with-their-message.md).
"""

import importlib
import inspect
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Protocol

from shoal import errors
from shoal._rpc.callers import set_caller
from shoal._rpc.calls import Call, CallClass, EndedWait, LaterReply, size_of
from shoal._security import Principal
from shoal._system.logs import Log

_log = Log(__name__)
_grpc: Any = importlib.import_module("grpc._server")
_cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")

# What `submit` gets from grpcio, after the function that runs a call in its context.
_ARGUMENTS = ["rpc_event", "state", "behavior", "argument_thunk", "request_deserializer", "response_serializer"]
_NAMES = ("_receive_message", "_abort", "_is_rpc_state_active", "_RECEIVE_MESSAGE_TOKEN", "_EMPTY_FLAGS")

# Lets a call wait. Takes the call's first message, and a function to call when the wait ends. Returns the function to
# call if the caller ends the call. Returns None if the call need not wait: it is then handled at once.
Hold = Callable[[Any, Callable[[], None]], Callable[[], None] | None]


def is_supported() -> bool:
    """Returns whether this version of grpcio has the private names that this module uses."""
    if not all(hasattr(_grpc, name) for name in _NAMES) or not hasattr(_cygrpc, "ReceiveMessageOperation"):
        return False
    if not hasattr(_grpc, "_RPCState") or not hasattr(_grpc._RPCState(), "rpc_errors"):
        return False
    responders = (getattr(_grpc, f"_{kind}_response_in_pool", None) for kind in ("unary", "stream"))
    return all(responder and list(inspect.signature(responder).parameters) == _ARGUMENTS for responder in responders)


SUPPORTED = is_supported()


def certificate_of(event: Any) -> bytes:
    """Returns the verified certificate of a call's client as PEM; empty if there is none."""
    return bytes(((_cygrpc.auth_context(event.call) or {}).get(b"x509_pem_cert") or [b""])[0])


def end_call(call: Call, code: Any, text: bytes, metadata: Any) -> None:
    """Ends a call that is active with an error.

    Args:
        call: the call.
        code: status of the error.
        text: message of the error.
        metadata: trailing metadata of the answer.
    """
    with call.state.condition:
        if _grpc._is_rpc_state_active(call.state):
            call.state.trailing_metadata = metadata
            _grpc._abort(call.state, call.event.call, code, text)


@dataclass(slots=True)
class _Submitted:
    """What grpcio submits to a pool to run a call.

    Attributes:
        run: calls a function in the call's context.
        respond: the function, which takes the arguments below in this order.
        event: the event of the call's headers.
        state: grpcio's state of the call.
        behavior: the method.
        argument: returns the method's argument: a request, or an iterator of requests.
        deserializer: decodes a request.
        serializer: encodes an answer.
    """

    run: Callable[..., Any]
    respond: Callable[..., Any]
    event: Any
    state: Any
    behavior: Any
    argument: Callable[[], Any]
    deserializer: Any
    serializer: Any

    def respond_to(self, argument: Callable[[], Any]) -> tuple[Any, LaterReply] | None:
        """Runs the method with another argument, and answers the call, unless its only reply has to wait.

        Returns:
            If the reply has to wait, the argument and the reply.
        """
        codecs, later = (self.deserializer, self.serializer), None
        if self.respond is not _grpc._unary_response_in_pool:
            self.run(self.respond, self.event, self.state, self.behavior, argument, *codecs)
            return None

        def behavior(request: Any, context: Any) -> Any:
            nonlocal later
            reply = self.behavior(request, context)
            if isinstance(reply, LaterReply):
                later = request, reply
                # As when the caller is gone: grpcio sends nothing, and the call stays open.
                error = _NotYet()
                self.state.rpc_errors.append(error)
                raise error
            return reply

        self.run(self.respond, self.event, self.state, behavior, argument, *codecs)
        return later


class _NotYet(Exception):
    """Ends the run of a method whose reply has to wait."""


class CallCounter(Protocol):
    """What a pool tells about its calls: the `Reception` of a server."""

    def authorize(self, name: str, event: Any) -> Principal | None:
        """Returns who makes a call, from grpcio's event of its headers, or raises why it is refused."""

    def admit(self, call: Call) -> errors.ShoalError | None:
        """Counts a call, or returns why it is refused."""

    def arrived(self, call: Call, nbytes: int) -> errors.ShoalError | None:
        """Notes that a call's message has arrived or will not arrive. Returns why the message is refused, or None."""

    def began(self, call: Call) -> None:
        """Notes that a call got its thread."""

    def ended(self, call: Call) -> None:
        """Notes the end of an admitted call."""

    def abort(self, call: Call, error: errors.ShoalError) -> None:
        """Ends a call with an error."""


class ReceivingPool(ThreadPoolExecutor):
    """The pool that grpcio uses for a method. It starts no thread: `submit` receives the first message of a call.

    It is a ThreadPoolExecutor because grpcio accepts no other pool.

    Args:
        reception: counts the calls, and decides which are refused.
        name: SERVICE/METHOD.
        threads: the threads on which the method runs.
        streaming: whether its requests are streams.
        kind: the class of its calls.
        hold: lets each call wait before the method runs. None means that calls do not wait.
    """

    def __init__(
        self,
        reception: CallCounter,
        name: str,
        threads: ThreadPoolExecutor,
        *,
        streaming: bool,
        kind: CallClass,
        hold: Hold | None,
    ) -> None:
        super().__init__(1)
        self._reception, self._name, self._pool, self._hold = reception, name, threads, hold
        self._streaming, self._kind = streaming, kind

    def submit(self, fn: Callable[..., Any], /, *args: Any, **_: Any) -> Future[Any]:
        """Receives a call. grpcio calls it on its event thread, with the lock of the call's state."""
        submitted = _Submitted(fn, *args)
        event, state = submitted.event, submitted.state
        call = Call(event, state, self._kind)
        try:
            state.context.run(set_caller, self._reception.authorize(self._name, event))
            refused = self._reception.admit(call)
        except errors.ShoalError as error:
            refused = error
        if refused:
            self._reception.abort(call, refused)
            call.ended.set_result(None)
            return call.ended
        receive = _grpc._receive_message(state, event.call, submitted.deserializer)

        def arrived(message: Any) -> Any:
            result = receive(message)  # decodes the message, and puts it in the state
            try:
                if refused := self._reception.arrived(call, size_of(state.request)):
                    state.request = None
                    self._reception.abort(call, refused)
                    self._end(call)
                else:
                    self._continue_call(call, submitted)
            except Exception:  # the event thread must survive
                _log.exception("cannot run a call")
                self._end(call)
            return result

        event.call.start_server_batch((_cygrpc.ReceiveMessageOperation(_grpc._EMPTY_FLAGS),), arrived)
        state.due.add(_grpc._RECEIVE_MESSAGE_TOKEN)
        return call.ended

    def _continue_call(self, call: Call, submitted: _Submitted) -> None:
        state, argument = call.state, submitted.argument
        with state.condition:
            request, state.request = state.request, None
            runs = _grpc._is_rpc_state_active(state) and (request is not None or self._streaming)
        if not runs:
            self._reception.abort(call, errors.BadRequest("the call ended without a message"))
            self._end(call)
            return

        def received() -> Any:
            if not self._streaming:
                return request
            return argument() if request is None else chain((request,), argument())  # None is an empty stream

        run = partial(self._run, call, submitted, received)
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
        go_on = self._once(call, run)
        try:
            # In a copy, because the handler may begin on another thread before `hold` returns.
            gone = call.state.context.copy().run(hold, request, go_on)
        except Exception:
            _log.exception("cannot let a call wait")
            go_on()
            return

        if gone is None:
            run()
        else:
            self._when_gone(call, gone)

    def _once(self, call: Call, run: Callable[[], None]) -> Callable[[], None]:
        """Returns a function that lets a call go on, the first time that it is called."""
        runs = [run]

        def go_on() -> None:
            with suppress(IndexError):  # a second time does nothing
                self._submit(call, partial(self._run_if_active, call, runs.pop()))

        return go_on

    def _when_gone(self, call: Call, gone: Callable[[], None]) -> None:
        """Calls a function on a thread of the pool when the caller is gone, or now if the caller is gone already."""

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

    def _run(self, call: Call, submitted: _Submitted, argument: Callable[[], Any]) -> None:
        self._reception.began(call)
        later: tuple[Any, LaterReply] | None = None
        try:
            later = submitted.respond_to(argument)
        finally:
            if later is None:
                self._end(call)
        if later is not None:
            self._await(call, submitted, *later)

    def _await(self, call: Call, submitted: _Submitted, request: Any, reply: LaterReply) -> None:
        """Lets a call wait for its reply, without a thread."""
        began = False

        def run() -> None:
            nonlocal began
            began = True
            self._run(call, submitted, lambda: EndedWait(request, reply))

        go_on = self._once(call, run)

        def gone() -> None:
            if not began:
                reply.withdraw()
                go_on()

        self._when_gone(call, gone)
        reply.on_end(go_on)

    def _end(self, call: Call) -> None:
        self._reception.ended(call)
        call.ended.set_result(None)


__all__ = ["SUPPORTED", "Hold", "ReceivingPool", "certificate_of", "end_call", "is_supported"]
