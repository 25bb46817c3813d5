"""The servers of one placement: a connection to each, calls to all, and the next placement when this one is old."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from shoal import _rpc, _tracing, errors
from shoal._transport import ServerConnection
from shoal._wire import Aggregation, ArraySource, Packer, Placement, PushPayload
from shoal.v1 import header_pb2

T = TypeVar("T")

_PLACEMENTS = 3  # that a call tries before it gives up
_THREADS = 16


class PlacedServers:
    """The servers of a job's shards, as one participant calls them.

    Args:
        placement: where the shards are.
        refresh: fetches the placement again when servers say that this one is old.
        worker: member id, or "" for a reader.
        incarnation: which life of the worker this is.
        retry_for_s: how long a server that does not answer is tried.
        setting: allows some transports, as SHOAL_TRANSPORT does.
        on_retry: told, on any thread, of each call that is repeated.

    Attributes:
        placement: the one in use.
        packer: of the placement.
        connections: one for each server, in the placement's order. They change only within `each`.
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
    ) -> None:
        self._refresh, self._setting = refresh, setting
        self._worker, self._incarnation = worker, incarnation
        self._retry_for_s, self.on_retry = retry_for_s, on_retry
        self._pool: ThreadPoolExecutor | None = None
        self.connections: list[ServerConnection] = []
        self._use(placement)

    def each(self, call: Callable[[ServerConnection], T]) -> list[T]:
        """Calls every server at once; on an old placement, fetches the new one and calls them all again."""
        call = _tracing.in_current_context(call)
        for _ in range(_PLACEMENTS):
            try:
                if self._pool is None:
                    return [call(connection) for connection in self.connections]
                try:
                    futures = [self._pool.submit(call, connection) for connection in self.connections]
                except RuntimeError:  # it is shut down
                    raise errors.Cancelled(f"the client of {self.placement.job} was closed") from None
                # All, before one raises: no call of this step may still run when the next one starts.
                wait(futures)
                # Taken out, for a failure's traceback leads here. If it led on to the failure itself, what that was
                # about, such as shared memory, would be kept until the garbage collector finds both.
                return [futures.pop(0).result() for _ in range(len(futures))]
            except errors.StaleGeneration:
                self._use(self._refresh())
        raise errors.StaleGeneration(f"the placement of {self.placement.job} keeps changing; try again later")

    def retrying(self, connection: ServerConnection, call: Callable[[], T], *, waits: bool = False) -> T:
        """Makes a call again for as long as its server does not answer.

        Args:
            connection: to the server.
            call: may be made any number of times.
            waits: it waits for others, so it has no deadline of its own.

        Raises:
            Unreachable: the server did not answer for `retry_for_s` seconds.
        """

        def attempt() -> T:
            while True:
                try:
                    return call()
                except errors.DeadlineExceeded:
                    if not waits:  # a pull that ran into its deadline was waiting for others: ask again
                        raise

        return _rpc.retrying(
            attempt,
            what=f"a server of {self.placement.job}",
            address=connection.address,
            for_s=self._retry_for_s,
            on_retry=lambda _: self.on_retry(),
        )

    def stamp(self, step: int) -> header_pb2.Stamp:
        """Returns the stamp of this participant's calls of a step, under the placement in use."""
        return header_pb2.Stamp(
            job=self.placement.job,
            worker=self._worker,
            incarnation=self._incarnation,
            step=step,
            generation=self.placement.generation,
            trace=_tracing.carrier(),
        )

    def load(
        self, connection: ServerConnection, arrays: ArraySource | None, aggregations: Sequence[Aggregation]
    ) -> PushPayload:
        """Returns what these arrays bring to one server; None: nothing yet."""
        return PushPayload(self.packer, connection.layouts, aggregations, arrays)

    def close(self) -> None:
        """Closes all connections; calls in progress end with Cancelled."""
        for connection in self.connections:
            connection.close()
        if self._pool:
            self._pool.shutdown(wait=True)

    def _use(self, placement: Placement) -> None:
        """Goes by this placement from now on, over fresh connections: their shards may be others."""
        for connection in self.connections:
            connection.close()
        self.placement = placement
        self.packer = Packer(placement)
        self.connections = [
            ServerConnection(address, [shard.layout for shard in shards], self._setting)
            for address, shards in placement.by_server().items()
        ]
        if len(self.connections) > 1 and self._pool is None:
            self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="shard")


__all__ = ["PlacedServers"]
