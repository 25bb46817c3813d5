"""The handler of Attend: calls that stay open as long as the processes of sessions live."""

import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import grpc

from shoal import _rpc, errors
from shoal.v1 import coordinator_pb2 as pb
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.member_holders import speaks_for
from shoal_coordinator.messages import events


class AttendHandler:
    """The handler of Attend. An open call holds no thread.

    gRPC ends a call when its connection ends. The kernel of a killed process closes its connections at once, so this
    tells of its death seconds before its heartbeat timeout.

    Args:
        coordinator: the shell.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._lock = threading.Lock()  # guards what follows
        # The open calls of each incarnation: a session that has lost its connection calls again before this end knows.
        self._open: Counter[tuple[str, int]] = Counter()
        self._replies: dict[object, Callable[[], None]] = {}  # by call; each lets it be answered
        self._stopped = False
        self.handler = _rpc.Deferred(self.Attend, self.hold)

    def hold(self, request: pb.AttendRequest, go_on: Callable[[], None]) -> Callable[[], None] | None:
        """Keeps a call open until its caller ends it, or `stop`."""
        key, call = (request.member, request.incarnation), object()
        with self._lock:
            self._open[key] += 1
            self._replies[call] = go_on
            stopped = self._stopped
        try:
            self._attend(request)
        except errors.ShoalError:  # `Attend` meets the same error, and reports it
            stopped = True
        if stopped:
            self._end(key, call)
            return None

        def gone() -> None:
            if self._end(key, call):
                with suppress(errors.ShoalError):  # the session has left, or the coordinator stops
                    self._coordinator.handle(events.AttendanceChanged(*key, absent=True))
            go_on()

        return gone

    @_rpc.servicer
    def Attend(self, request: pb.AttendRequest, _: grpc.ServicerContext) -> bytes:
        """Answers a call that is refused, or that ends because the coordinator stops."""
        if not self._stopped:
            self._attend(request)  # raises why it is refused
        return pb.AttendReply().SerializeToString()

    def stop(self) -> None:
        """Answers all calls."""
        with self._lock:
            self._stopped = True
            replies = [*self._replies.values()]
            self._open.clear()
            self._replies.clear()
        for reply in replies:
            reply()

    def _end(self, key: tuple[str, int], call: object) -> bool:
        """Forgets a call. Returns whether its caller ended it, and has no other one."""
        with self._lock:
            if self._replies.pop(call, None) is None:
                return False
            self._open[key] -= 1
            if last := not self._open[key]:
                del self._open[key]
            return last

    def _attend(self, request: pb.AttendRequest) -> None:
        key = request.member, request.incarnation
        self._coordinator.handle(events.AttendanceChanged(*key, absent=False), speaks_for(_rpc.caller(), *key))


__all__ = ["AttendHandler"]
