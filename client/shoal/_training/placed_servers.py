"""Servers of one placement: calls to all of them, which are repeated when the placement changes.

`group_connections` has the connections, and `repeated_calls` repeats the call to one server.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from shoal import _tracing, errors
from shoal._security import NO_CREDENTIALS, Credentials
from shoal._training.call_threads import CallThreads
from shoal._training.failover import Locator
from shoal._training.group_connections import GroupConnections
from shoal._training.repeated_calls import RepeatedCalls
from shoal._transport import ServerConnection
from shoal._wire import Aggregation, ArraySource, Packer, Placement, PushPayload
from shoal._wire.limits import MAX_STEP
from shoal.v1 import header_pb2

T = TypeVar("T")

_PLACEMENTS = 3  # generations that a call tries before it fails


class PlacedServers:
    """The servers of a job's shards, for one participant.

    Args:
        placement: placement of the job.
        refresh: returns the placement again when servers report that this one is old.
        worker: member id, or "" for a reader.
        incarnation: incarnation of the worker.
        retry_for_s: seconds for which calls to a server that does not answer are repeated.
        setting: selects transports, as SHOAL_TRANSPORT does.
        on_retry: called on any thread for each repeated call.
        credentials: what this process presents to the servers.
        locate: returns a placement as it is now, as `failover.locate` does; None means that lock groups never move.
        replicated: whether the job has backups. A call then waits for one if the primary is lost.

    Attributes:
        groups: the connections. They are replaced only within `each` and `before_push`.
        calls: makes the calls to one server, and repeats them.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        refresh: Callable[[], Placement],
        worker: str,
        incarnation: int,
        retry_for_s: float,
        setting: str,
        on_retry: Callable[[], None],
        credentials: Credentials = NO_CREDENTIALS,
        locate: Callable[[Placement], Placement] | None = None,
        replicated: bool = False,
    ) -> None:
        self._worker, self._incarnation = worker, incarnation
        self._slot_packer: tuple[Placement | None, Packer | None] = None, None  # and the placement that it is for
        self._threads = CallThreads("shard")
        self.groups = GroupConnections(
            placement, refresh=refresh, setting=setting, credentials=credentials, replicated=replicated
        )
        self.calls = RepeatedCalls(
            self.groups,
            Locator(locate),
            retry_for_s=retry_for_s,
            on_retry=on_retry,
            credentials=credentials,
            reads_only=not worker,
        )

    @property
    def placement(self) -> Placement:
        """The placement in use."""
        return self.groups.placement

    @property
    def packer(self) -> Packer:
        """The packer of the placement's generation."""
        return self.groups.packer

    @property
    def slot_packer(self) -> Packer:
        """The packer of the slots of the same placement."""
        placement, (known, packer) = self.groups.placement, self._slot_packer
        if packer is None or known is not placement:
            packer = Packer(placement.of_slots)
            self._slot_packer = placement, packer
        return packer

    @property
    def connections(self) -> list[ServerConnection]:
        """One connection for each lock group, in the placement's order."""
        return self.groups.connections

    def each(self, call: Callable[[ServerConnection], T], *, begin: Callable[[], object] = bool) -> list[T]:
        """Calls every server in parallel. If the placement is old, fetches the new one and repeats all calls.

        If Ctrl-C interrupts this thread, the connections are replaced, which ends the calls of the other threads. They
        would otherwise share a connection with the next calls.

        Args:
            call: makes the call to one server.
            begin: called before the calls are made, each time.

        Returns:
            The results, in the order of the connections.
        """
        call = _tracing.in_current_context(call)

        def call_all() -> list[T]:
            begin()
            calls = [partial(call, connection) for connection in self.groups.connections]
            return self._threads.run(calls, abandon=lambda: self.groups.use(self.groups.placement))

        return self._on_newest(call_all)

    def before_push(self, call: Callable[[ServerConnection], T]) -> dict[ServerConnection, T]:
        """Opens a transport for pushes to each server, unless one is open, and then makes the call for each server.

        The transports are opened in parallel, so a server that does not answer does not delay the others. The calls are
        made on this thread, one after the other.

        Args:
            call: prepares the push to one server, without waiting for the server.

        Returns:
            The results by connection.
        """

        def prepare_all() -> dict[ServerConnection, T]:
            connections = [*self.groups.connections]
            if closed := [connection for connection in connections if not connection.pushes_open]:
                self._threads.run([partial(self.calls.retrying, each, each.open_for_pushes) for each in closed])
            return {each: self.calls.retrying(each, partial(call, each)) for each in connections}

        return self._on_newest(prepare_all)

    def stamp(self, step: int) -> header_pb2.Stamp:
        """Returns the stamp of this participant's calls of a step, with the current placement's generation.

        Raises:
            BadRequest: the step is not in [0, MAX_STEP).
        """
        placement = self.groups.placement
        if not 0 <= step < MAX_STEP:
            raise errors.BadRequest(
                f"job {placement.job}: step {step} of {self._worker} is out of range; the limit MAX_STEP is {MAX_STEP}",
                job=placement.job,
                step=step,
            )
        return header_pb2.Stamp(
            job=placement.job,
            worker=self._worker,
            incarnation=self._incarnation,
            step=step,
            generation=placement.generation,
            trace=_tracing.carrier(),
        )

    def payload(
        self, connection: ServerConnection, arrays: ArraySource | None, aggregations: Sequence[Aggregation]
    ) -> PushPayload:
        """Returns the payload of these arrays for one server.

        Args:
            connection: connection to the server.
            arrays: the arrays, by variable; None means that there are none yet.
            aggregations: aggregations of the slabs that the payload carries.
        """
        return PushPayload(self.groups.packer, connection.layout, aggregations, arrays)

    def close(self) -> None:
        """Closes all connections. Calls in progress end with Cancelled."""
        self.groups.close()
        self._threads.close()

    def _on_newest(self, call: Callable[[], T]) -> T:
        """Makes a call, and repeats it with the newest placement if the one in use is old.

        Another thread may make calls and replace the connections meanwhile. The calls on those that it closes are
        repeated as well.
        """
        left = _PLACEMENTS
        while left:
            uses = self.groups.uses
            try:
                return call()
            except errors.StaleGeneration:
                left -= self.groups.renew(uses)
            except errors.Cancelled:
                if self.groups.uses == uses or self.groups.closed.is_set():
                    raise
        raise errors.StaleGeneration(f"the placement of {self.placement.job} keeps changing; try again later")


__all__ = ["PlacedServers"]
