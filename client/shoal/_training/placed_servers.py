"""Servers of one placement: a connection to each lock group, calls to all of them, and the change to a newer placement."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from shoal import _rpc, _tracing, errors
from shoal._memory.gc_control import delayed_gc
from shoal._security import NO_CREDENTIALS, Credentials
from shoal._training.call_threads import CallThreads
from shoal._transport import ServerConnection
from shoal._wire import Aggregation, ArraySource, Packer, Placement, PushPayload
from shoal._wire.limits import MAX_STEP
from shoal.v1 import header_pb2

T = TypeVar("T")

_PLACEMENTS = 3  # placements that a call tries before it fails


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

    Attributes:
        placement: the placement in use.
        packer: packer of the placement.
        connections: one connection for each lock group, in the placement's order. They change only within `each`.
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
    ) -> None:
        self._refresh, self._setting, self._credentials = refresh, setting, credentials
        self._worker, self._incarnation = worker, incarnation
        self._retry_for_s, self.on_retry = retry_for_s, on_retry
        self._threads = CallThreads("shard")
        self.connections: list[ServerConnection] = []
        self._use(placement)

    def each(self, call: Callable[[ServerConnection], T]) -> list[T]:
        """Calls every server in parallel. If the placement is old, fetches the new one and repeats all calls.

        If Ctrl-C interrupts this thread, the connections are replaced, which ends the calls of the other threads. They
        would otherwise share a connection with the next calls.
        """
        call = _tracing.in_current_context(call)
        for _ in range(_PLACEMENTS):
            try:
                calls = [partial(call, connection) for connection in self.connections]
                return self._threads.run(calls, abandon=lambda: self._use(self.placement))
            except errors.StaleGeneration:
                self._use(self._refresh())
        raise errors.StaleGeneration(f"the placement of {self.placement.job} keeps changing; try again later")

    def before_push(self, call: Callable[[ServerConnection], T]) -> dict[ServerConnection, T]:
        """Opens a transport for pushes to each server, unless one is open, and then makes the call for each server.

        The transports are opened in parallel, so a server that does not answer does not delay the others. The calls are
        made on this thread, one after the other.

        Args:
            call: prepares the push to one server, without waiting for the server.

        Returns:
            The results by connection.
        """
        connections = [*self.connections]
        if closed := [connection for connection in connections if not connection.pushes_open]:
            self._threads.run([partial(self.retrying, each, each.open_for_pushes) for each in closed])
        return {each: self.retrying(each, partial(call, each)) for each in connections}

    def retrying(self, connection: ServerConnection, call: Callable[[], T], *, waits: bool = False) -> T:
        """Repeats a call while its server does not answer, and once with another ticket if the server refuses this one.

        A participant's pull is also repeated while the server is overloaded, as when slow readers use its memory.
        A ticket is refused when the token that it was made for was revoked. The caller may have another token by then.

        Args:
            connection: connection to the server.
            call: the call, which must be safe to repeat.
            waits: the call waits for other workers, so it is repeated after its deadline.

        Returns:
            The result of the call.

        Raises:
            Unreachable: the server did not answer for `retry_for_s` seconds.
            Unauthenticated: the server refuses a new ticket as well, or the coordinator gives none.
        """
        renewed = False
        backoff: _rpc.Backoff | None = None  # made when it is needed: each pull and push comes here

        def attempt() -> T:
            nonlocal renewed, backoff
            while True:
                try:
                    return call()
                except errors.DeadlineExceeded:
                    if not waits:  # a pull at its deadline waits for other workers: repeat it
                        raise
                except errors.Overloaded:
                    if not waits or not self._worker:  # a reader decides itself
                        raise
                    self.on_retry()
                    backoff = backoff or _rpc.Backoff()
                    time.sleep(backoff.next())
                except errors.Unauthenticated:
                    if renewed:
                        raise
                    renewed = True
                    self._credentials.discard_token()
                    connection.reopen()

        return _rpc.retrying(
            attempt,
            what=f"a server of {self.placement.job}",
            address=connection.address,
            for_s=self._retry_for_s,
            on_retry=lambda _: self.on_retry(),
        )

    def stamp(self, step: int) -> header_pb2.Stamp:
        """Returns the stamp of this participant's calls of a step, with the current placement's generation.

        Raises:
            BadRequest: the step is not in [0, MAX_STEP).
        """
        if not 0 <= step < MAX_STEP:
            raise errors.BadRequest(
                f"job {self.placement.job}: step {step} of {self._worker} is out of range; "
                f"the limit MAX_STEP is {MAX_STEP}",
                job=self.placement.job,
                step=step,
            )
        return header_pb2.Stamp(
            job=self.placement.job,
            worker=self._worker,
            incarnation=self._incarnation,
            step=step,
            generation=self.placement.generation,
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
        return PushPayload(self.packer, connection.layout, aggregations, arrays)

    def close(self) -> None:
        """Closes all connections. Calls in progress end with Cancelled."""
        for connection in self.connections:
            connection.close()
        self._threads.close()

    def _use(self, placement: Placement) -> None:
        """Changes to this placement, with new connections, because each server's shards may differ."""
        for connection in self.connections:
            connection.close()
        self.placement = placement
        with delayed_gc():
            self.packer = Packer(placement)
        self.connections = [
            ServerConnection(placement.shards[group].address, layout, self._setting, self._credentials)
            for group, layout in self.packer.groups.items()
        ]


__all__ = ["PlacedServers"]
