"""Calls of one RPC to many servers at the same time. A call is repeated while its server does not answer."""

import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shoal import _rpc, errors
from shoal._rpc import Backoff
from shoal_coordinator.effects.server_channels import LentChannel, ServerChannels
from shoal_coordinator.messages import ServerRef

# Calls of one effect in flight. Each keeps a request in memory, and gRPC has a thread for each channel in use.
AT_A_TIME = 64
# Seconds between two checks whether calls are still wanted.
_CHECK_S = 0.25


class ServerSilent(Exception):
    """A server has not answered within the patience. The effect should wait for it in another pool of threads."""


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """How calls are repeated and abandoned.

    Attributes:
        check_wanted: Raises Cancelled, with a reason, if calls to a server are no longer wanted.
        on_retry: Called for each repeated call.
        retry_for_s: Seconds from a call's first failure during which it is repeated.
        patience_s: Seconds without an answer of a server after which `ServerSilent` is raised. None: no limit.
        keep_errors: Whether the error of one server is returned in the place of its reply, instead of raised.
    """

    check_wanted: Callable[[ServerRef, str], None]
    on_retry: Callable[[], None]
    retry_for_s: float
    patience_s: float | None = None
    keep_errors: bool = False


@dataclass(eq=False, slots=True)
class _ServerCall:
    """The call to one server.

    Attributes:
        place: Its place among the servers.
        due: When it is to begin, or to begin again.
        began: When it first began; 0 before that.
        failed: When it first failed; 0 before that.
        why: Its last failure.
        lent: The channel of the attempt in progress.
        future: The attempt in progress.
    """

    place: int
    server: ServerRef
    due: float = 0.0
    began: float = 0.0
    failed: float = 0.0
    why: str = "it has not answered yet"
    backoff: Backoff = field(default_factory=Backoff)
    lent: LentChannel | None = None
    future: Any = None


class ParallelCalls:
    """The calls of one RPC to some servers, made by one thread.

    Args:
        channels: The channels.
        policy: How calls are repeated and abandoned.
        begin: Starts the RPC on a stub for a server, and returns its future. It raises Unreachable if the server cannot
            be called now.
        clock: Returns seconds that never go back.
    """

    def __init__(
        self,
        channels: ServerChannels,
        policy: CallPolicy,
        begin: Callable[[Any, ServerRef], Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channels, self._policy, self._begin_rpc, self._clock = channels, policy, begin, clock
        self._later: list[_ServerCall] = []  # to begin, or to begin again
        self._running: set[_ServerCall] = set()
        self._replies: dict[int, Any] = {}  # by place
        self._ended: queue.SimpleQueue[_ServerCall] = queue.SimpleQueue()

    def run(self, servers: Sequence[ServerRef]) -> list[Any]:
        """Makes the calls, and returns the replies in the order of the servers.

        Raises:
            ShoalError: The first error that a server has returned. The other calls are cancelled.
            Unreachable: A server did not answer in time.
            Cancelled: The calls are no longer wanted.
            ServerSilent: A server has not answered within the patience.
        """
        self._later = [_ServerCall(place, server) for place, server in enumerate(servers)]
        self._replies.clear()
        try:
            while len(self._replies) < len(servers):
                self._begin_due()
                call = self._next_ended()
                if call is None:
                    self._check_all()
                elif call in self._running:  # else it was abandoned
                    self._end(call)
        finally:
            for call in [*self._running]:
                self._give_back(call)
        return [self._replies[place] for place in range(len(servers))]

    def _begin_due(self) -> None:
        now, room = self._clock(), AT_A_TIME - len(self._running)
        due = [call for call in self._later if call.due <= now][:room]
        if due:
            self._later = [call for call in self._later if call not in due]
        for call in due:
            call.began = call.began or now
            self._running.add(call)
            with self._failing(call):
                call.lent = self._channels.borrow(call.server)
                self._policy.check_wanted(call.server, call.why)  # a job that restarts has abandoned its effects
                try:
                    call.future = self._begin_rpc(call.lent.stub, call.server)
                except errors.Unreachable as error:
                    self._give_back(call)
                    self._repeat_later(call, error)
                    continue
                call.future.add_done_callback(lambda _, ended=call: self._ended.put(ended))

    def _next_ended(self) -> _ServerCall | None:
        """Waits for the next call that ends; None after a while, or when another call is due."""
        within_s = _CHECK_S
        if self._later and len(self._running) < AT_A_TIME:
            within_s = min(_CHECK_S, max(0.001, min(call.due for call in self._later) - self._clock()))
        try:
            return self._ended.get(timeout=within_s)
        except queue.Empty:
            return None

    def _end(self, call: _ServerCall) -> None:
        future = call.future
        self._give_back(call)
        with self._failing(call):
            try:
                with _rpc.as_shoal_errors(call.server.address):
                    self._replies[call.place] = future.result()
            except (errors.Unreachable, errors.DeadlineExceeded) as error:
                self._repeat_later(call, error)
                return
            except errors.ShoalError:
                self._channels.answered(call.server)
                raise
            self._channels.answered(call.server)

    def _repeat_later(self, call: _ServerCall, error: errors.ShoalError) -> None:
        now, for_s = self._clock(), self._policy.retry_for_s
        call.failed, call.why = call.failed or now, error.message
        self._policy.check_wanted(call.server, error.message)
        if not for_s:
            raise error
        if now - call.failed + call.backoff.at_most > for_s:
            raise errors.Unreachable(
                f"server {call.server.member} at {call.server.address} did not answer within {for_s:g} s "
                f"({error.message}); check that it is running and that the address is right",
                address=call.server.address,
            )
        self._check_patience(call, now)
        self._policy.on_retry()
        call.due = now + call.backoff.next()
        self._later.append(call)

    def _check_all(self) -> None:
        now = self._clock()
        for call in [*self._running, *self._later]:
            if call.began:
                with self._failing(call):
                    self._policy.check_wanted(call.server, call.why)
                self._check_patience(call, now)

    def _check_patience(self, call: _ServerCall, now: float) -> None:
        patience_s = self._policy.patience_s
        if patience_s is not None and now - call.began > patience_s:
            self._channels.mark_silent(call.server)
            raise ServerSilent(call.server.member)

    @contextmanager
    def _failing(self, call: _ServerCall) -> Iterator[None]:
        """Ends a call for which the block raises an error. Re-raises the error, unless the policy keeps it."""
        try:
            with _rpc.as_shoal_errors(call.server.address):
                yield
        except errors.ShoalError as error:
            self._give_back(call)
            self._later = [it for it in self._later if it is not call]
            if not self._policy.keep_errors:
                raise
            self._replies[call.place] = error

    def _give_back(self, call: _ServerCall) -> None:
        """Ends an attempt, and cancels it if it has not ended."""
        self._running.discard(call)
        if call.future is not None:
            call.future.cancel()
        if call.lent is not None:
            self._channels.give_back(call.lent)
        call.future = call.lent = None


__all__ = ["AT_A_TIME", "CallPolicy", "ParallelCalls", "ServerSilent"]
