"""The handler of Watch, the call that streams a job's events."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

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


class WatchHandler:
    """The handler of Watch, whose calls run in a separate pool.

    Args:
        coordinator: The shell.
        most: The limit of concurrent calls.
        has_ended: Returns whether the token of a caller was revoked or has expired. The caller's streams then end.
    """

    def __init__(self, coordinator: Coordinator, most: int, has_ended: HasEnded) -> None:
        self._coordinator, self._has_ended = coordinator, has_ended
        # grpcio runs a handler that has this attribute in that pool instead of the server's pool.
        self.experimental_thread_pool = ThreadPoolExecutor(most + _SPARE_THREADS, thread_name_prefix="watch")
        self._watchers = Watchers(catalogue.WATCHERS, catalogue.CALLER_WATCHERS, "calls watch jobs", most=most)

    @property
    def open(self) -> int:
        """The number of open calls."""
        return self._watchers.open

    def __call__(self, request: pb.WatchRequest, context: grpc.ServicerContext) -> Iterator[pb.Event]:
        """Streams the events of a job."""
        caller = _rpc.caller()

        def gone() -> bool:
            return not context.is_active() or self._has_ended(caller)

        try:
            with self._watchers.one_more(caller):
                context.add_callback(self._coordinator.wake)
                for event in self._coordinator.watch(request.job, request.after, wait=not request.no_wait, gone=gone):
                    yield event_message(event)
                if caller and self._has_ended(caller):
                    raise errors.Unauthenticated(
                        f"the {caller.proof} of {caller} was revoked or has expired; get a new one from an admin"
                    )
        except errors.ShoalError as error:
            _rpc.refuse(context, error)


__all__ = ["HasEnded", "WatchHandler"]
