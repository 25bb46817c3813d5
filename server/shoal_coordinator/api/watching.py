"""The handler of Watch, the call that streams a job's events."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from shoal import _rpc, errors
from shoal._limits import catalogue
from shoal._security import Principal
from shoal.v1 import job_pb2 as pb
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.messages import event_message
from shoal_coordinator.watchers import Watchers

# Threads that are kept free to refuse further watchers.
_SPARE_THREADS = 2
# Returns whether the token of a caller was revoked or has expired.
HasEnded = Callable[[Principal | None], bool]
# Checks that find the token of an open call ended, before the call is cancelled. A client that reads learns the reason
# before that.
_CHECKS = 3


@dataclass(eq=False, slots=True)
class _OpenCall:
    caller: Principal
    context: grpc.ServicerContext
    checks: int = 0  # that found its token ended


class WatchHandler:
    """The handler of Watch, whose calls run in a separate pool.

    Args:
        coordinator: The shell.
        most: The limit of concurrent calls.
        has_ended: Returns whether the token of a caller was revoked or has expired. The caller's streams then end.
    """

    def __init__(self, coordinator: Coordinator, most: int, has_ended: HasEnded) -> None:
        self._coordinator, self._has_ended = coordinator, has_ended
        self._calls: set[_OpenCall] = set()  # single operations of a set are atomic
        # grpcio runs a handler that has this attribute in that pool instead of the server's pool.
        self.experimental_thread_pool = ThreadPoolExecutor(most + _SPARE_THREADS, thread_name_prefix="watch")
        self._watchers = Watchers(catalogue.WATCHERS, catalogue.CALLER_WATCHERS, "calls watch jobs", most=most)

    @property
    def open(self) -> int:
        """The number of open calls."""
        return self._watchers.open

    def end_refused(self) -> None:
        """Cancels the calls of callers whose tokens have ended.

        A call ends by itself with the next event, or within a second. The thread of a call whose client does not read
        waits until there is room for an event. So such a call is cancelled.
        """
        for call in [*self._calls]:
            if self._has_ended(call.caller):
                call.checks += 1
                if call.checks >= _CHECKS:
                    call.context.cancel()

    def __call__(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Event]:
        """Streams the events of a job."""
        caller = _rpc.caller()

        def gone() -> bool:
            return not context.is_active() or self._has_ended(caller)

        call = _OpenCall(caller, context) if caller else None
        try:
            with self._watchers.one_more(caller):
                if call:
                    self._calls.add(call)
                for event in self._coordinator.watch(request.job, request.after, wait=not request.no_wait, gone=gone):
                    yield event_message(event)
                if caller and self._has_ended(caller):
                    raise errors.Unauthenticated(
                        f"the {caller.proof} of {caller} was revoked or has expired; get a new one from an admin"
                    )
        except errors.ShoalError as error:
            _rpc.refuse(context, error)
        finally:
            if call:
                self._calls.discard(call)


__all__ = ["HasEnded", "WatchHandler"]
