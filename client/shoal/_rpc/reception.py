"""The reception of a server's calls: a call gets a thread when its first message is complete, within limits.

An unmodified grpcio server gives a call a thread when its headers arrive, and the thread waits for the message. So
calls that send headers but never a message can take all threads. A `ReceivingPool` first receives the message, which
needs no thread. This module counts the calls, and refuses or ends those that are beyond the limits
(docs/decisions/0044-calls-get-a-thread-with-their-message.md). A server that checks tokens does not start if the
installed grpcio cannot do this.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from shoal import errors
from shoal._rpc.call_limits import CallLimits
from shoal._rpc.calls import Call, CallClass, host_of
from shoal._rpc.outcomes import CallOutcome, OnOutcome
from shoal._rpc.receiving_pool import SUPPORTED, Hold, ReceivingPool, certificate_of, end_call
from shoal._security import Authorizer, Principal, shown_in, token_in
from shoal._system import resident_bytes
from shoal._system.logs import Log

_log = Log(__name__)
# Seconds between two checks for late messages, and of the memory of the process.
_LATE_POLL_S = 0.5


class Reception:
    """The reception of one server. Thread-safe.

    Each class of calls is counted separately, so no class uses up the limits of another.

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
        if authorizer and not SUPPORTED:
            raise errors.StartFailed(
                "this grpcio cannot refuse calls before their messages arrive; install grpcio 1.85"
            )
        self._limits, self._refusal, self._clock, self._resident = limits, refusal, clock, resident
        self._authorizer, self._on_outcome = authorizer, on_outcome
        self._lock = threading.Lock()  # guards what follows; nothing is called under it
        self._calls: Counter[tuple[CallClass, bytes]] = Counter()  # by class and host
        self._totals = dict.fromkeys(CallClass, 0)
        self._received = dict.fromkeys(CallClass, 0)  # bytes of messages that wait for a thread
        self._expected: dict[Call, float] = {}  # calls without a message, in order of arrival, and since when
        self._queued: dict[Call, float] = {}  # essential calls that wait for a thread, and since when
        self._longest_wait_s, self._essential_refused = 0.0, 0  # since they were last taken
        self._stopped = threading.Event()
        self._watch = threading.Thread(target=self._end_late_calls, name="late-calls", daemon=True)

    def start(self) -> None:
        """Starts to end calls whose message is late."""
        if not SUPPORTED:
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
        self, name: str, threads: ThreadPoolExecutor, *, streaming: bool, kind: CallClass, hold: Hold | None = None
    ) -> ThreadPoolExecutor:
        """Returns the pool to give to grpcio for a method: it receives the first message, then uses `threads`.

        Args:
            name: SERVICE/METHOD.
            threads: the threads on which the method runs.
            streaming: whether its requests are streams.
            kind: the class of its calls.
            hold: lets each call wait before the method runs. None means that calls do not wait.

        Returns:
            The pool.
        """
        if not SUPPORTED:
            return threads
        return ReceivingPool(self, name, threads, streaming=streaming, kind=kind, hold=hold)

    def authorize(self, name: str, event: Any) -> Principal | None:
        """Returns who makes the call `name`, from grpcio's event of its headers. Raises as `Authorizer.authorize`."""
        allow, metadata = self._authorizer, event.invocation_metadata
        if allow is None:
            return None
        who: list[Principal] = []
        try:
            caller = allow.authorize(name, token_in(metadata), lambda: certificate_of(event), who.append)
            return allow.with_member(caller, shown_in(metadata))
        except errors.ShoalError as why:
            self._on_outcome(CallOutcome(name, next(iter(who), None), host_of(event), why.status, reason=why.message))
            raise

    def admit(self, call: Call) -> errors.ShoalError | None:
        """Counts a call, or returns why it is refused."""
        key = call.kind, call.host
        with self._lock:
            refused = self._limits.too_many(call.kind, call.host, self._calls[key], self._totals[call.kind])
            if refused is None:
                self._totals[call.kind] += 1
                self._calls[key] += 1
                self._expected[call] = self._clock()
            else:
                self._essential_refused += call.kind is CallClass.ESSENTIAL
        return refused

    def arrived(self, call: Call, nbytes: int) -> errors.ShoalError | None:
        """Notes that a call's message has arrived or will not arrive. Returns why the message is refused, or None."""
        with self._lock:
            self._expected.pop(call, None)
            if refused := self._limits.too_large(nbytes, self._received[call.kind]):
                return refused
            call.nbytes = nbytes
            self._received[call.kind] += nbytes
            if call.kind is CallClass.ESSENTIAL:
                self._queued[call] = self._clock()
        return None

    def began(self, call: Call) -> None:
        """Notes that a call got its thread."""
        now = self._clock()
        with self._lock:
            self._free(call)
            if call.kind is CallClass.ESSENTIAL:
                self._longest_wait_s = max(self._longest_wait_s, now - self._queued.pop(call, now))

    def ended(self, call: Call) -> None:
        """Notes the end of an admitted call."""
        key = call.kind, call.host
        with self._lock:
            self._free(call)
            self._queued.pop(call, None)
            self._totals[call.kind] -= 1
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
        """Ends calls without a first message, except essential ones, if the process uses too much memory.

        Parts of their messages may take much memory. New calls are not refused, so the role stays reachable even if the
        process continues to use much memory.

        Returns:
            The number of ended calls.
        """
        resident = self._resident()
        if resident <= self._limits.memory_bytes:
            return 0
        with self._lock:
            ended = [call for call in self._expected if call.kind is not CallClass.ESSENTIAL]
            for call in ended:
                del self._expected[call]
        for call in ended:
            self.abort(call, self._limits.no_memory(resident))
        return len(ended)

    def _free(self, call: Call) -> None:
        """Notes that a call's message no longer waits. Called with the lock."""
        self._received[call.kind] -= call.nbytes
        call.nbytes = 0

    def abort(self, call: Call, error: errors.ShoalError) -> None:
        """Ends a call with an error."""
        code, text, metadata = self._refusal(error)
        end_call(call, code, text, metadata)

    def _end_late_calls(self) -> None:
        while not self._stopped.wait(_LATE_POLL_S):
            try:
                if ended := self.end_late():
                    _log.warning("ended calls whose message did not arrive", calls=ended)
                if ended := self.end_for_memory():
                    _log.warning("ended calls without a message, because the process uses too much memory", calls=ended)
            except Exception:
                _log.exception("cannot end late calls")


__all__ = ["Reception"]
