"""Servers of one placement: a connection to each lock group, calls to all of them, and changes of the placement.

A lock group that moves to another server keeps its connection. If a group is split, its parts have new connections, and
so have all groups of a placement of another generation.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from shoal import _tracing, errors
from shoal._memory.gc_control import delayed_gc
from shoal._security import NO_CREDENTIALS, Credentials
from shoal._system.logs import Log
from shoal._training.call_threads import CallThreads
from shoal._training.failover import WITHOUT_PRIMARY, AttemptBackoff, Locator, shortened
from shoal._transport import ServerConnection
from shoal._wire import Aggregation, ArraySource, Packer, Placement, PushPayload
from shoal._wire.limits import MAX_STEP
from shoal.v1 import header_pb2

T = TypeVar("T")

_log = Log(__name__)

_PLACEMENTS = 3  # generations that a call tries before it fails
# A call that takes longer may wait for a server that was lost without a word: seconds until the coordinator is asked,
# and the pause between two questions, at least and at most. Between them, a part of the time that the call has taken:
# a server is declared lost after a few seconds, and a call that waits for other workers may take much longer.
_LATE_S, _LONGEST_PAUSE_S, _PART = 1.0, 4.0, 0.25


@dataclass(slots=True)
class _Failures:
    """The failed attempts of one call.

    Attributes:
        connection: connection to the lock group.
        waits: whether the call waits for other workers.
        backoff: the pauses before the next attempts.
        renewed: whether the server has refused a ticket.
        silent_at: when the group first had no server that answers; None means that it has one.
    """

    connection: ServerConnection
    waits: bool
    backoff: AttemptBackoff
    renewed: bool = False
    silent_at: float | None = None


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
        placement: the placement in use.
        packer: packer of the placement's generation.
        connections: one connection for each lock group, in the placement's order. They are replaced only within `each`
            and `before_push`.
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
        self._refresh, self._setting, self._credentials = refresh, setting, credentials
        self._worker, self._incarnation = worker, incarnation
        self._retry_for_s, self.on_retry = retry_for_s, on_retry
        self._threads = CallThreads("shard")
        self._locator, self._replicated = Locator(locate), replicated
        self._begun: dict[object, float] = {}  # when the calls in progress began
        self._watching, self._closed = False, threading.Event()
        self._renewing = threading.Lock()  # held while the connections are replaced; _moving is taken under it
        self._moving = threading.Lock()  # guards the next four
        self._newer: Placement | None = None  # of another generation, or with other lock groups
        self._uses = 0  # how often the connections were replaced
        self.placement = placement
        self.connections: list[ServerConnection] = []
        self.packer: Packer
        self._use(placement)

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
            calls = [partial(call, connection) for connection in self.connections]
            return self._threads.run(calls, abandon=lambda: self._use(self.placement))

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
            connections = [*self.connections]
            if closed := [connection for connection in connections if not connection.pushes_open]:
                self._threads.run([partial(self.retrying, each, each.open_for_pushes) for each in closed])
            return {each: self.retrying(each, partial(call, each)) for each in connections}

        return self._on_newest(prepare_all)

    def retrying(self, connection: ServerConnection, call: Callable[[], T], *, waits: bool = False) -> T:
        """Repeats a call while its server does not answer, and once with another ticket if the server refuses this one.

        If the lock group has moved to another server, its connection moves, and the call is repeated there. If the
        primary is lost and the job has a backup, the call is repeated until the backup is promoted. A participant's
        pull is also repeated while the server is overloaded, as when slow readers use its memory. A ticket is refused
        when the token that it was made for was revoked. The caller may have another token by then.

        Args:
            connection: connection to the lock group.
            call: the call, which must be safe to repeat.
            waits: the call waits for other workers, so it is repeated after its deadline.

        Returns:
            The result of the call.

        Raises:
            Unreachable: the server did not answer for `retry_for_s` seconds.
            StaleGeneration: the job has a placement of another generation, or with other lock groups.
            Unauthenticated: the server refuses a new ticket as well, or the coordinator gives none.
        """
        failures: _Failures | None = None  # made when it is needed: each pull and push comes here
        while True:
            moves = connection.moves
            try:
                with self.watched():
                    return call()
            except errors.ShoalError as error:
                failures = failures or _Failures(connection, waits, AttemptBackoff(time.monotonic()))
                if not self._repeats(error, failures, moves):
                    raise

    @staticmethod
    def may_have_moved(error: errors.ShoalError) -> bool:
        """Returns whether another server may have these shards after an error. `retrying` finds out."""
        return isinstance(error, (errors.Moved, *WITHOUT_PRIMARY))

    def _is_lost(self, error: errors.ShoalError) -> bool:
        """Returns whether an error says that another server has these shards, or soon will."""
        return isinstance(error, errors.Moved) or (self._replicated and isinstance(error, WITHOUT_PRIMARY))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Looks for the moved lock group of a call that takes long, in a job with backups; see `_watch`."""
        if not self._replicated:
            yield
            return
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._watch, name="failover", daemon=True).start()
        call = object()
        self._begun[call] = time.monotonic()
        try:
            yield
        finally:
            del self._begun[call]

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
        self._closed.set()
        self._close_all()
        self._threads.close()

    def _close_all(self) -> None:
        for connection in self.connections:
            connection.close()

    def _repeats(self, error: errors.ShoalError, failures: _Failures, moves: int) -> bool:
        """Waits until it is time to repeat a call, if that may help. Returns whether to repeat it.

        Args:
            error: the error of the last attempt.
            failures: the failed attempts.
            moves: how often the connection had been moved when the last attempt began.

        Raises:
            Unreachable, StaleGeneration: as for `retrying`.
        """
        connection = failures.connection
        if isinstance(error, errors.DeadlineExceeded) and failures.waits:
            return True  # a pull at its deadline waits for other workers
        if isinstance(error, errors.Overloaded):
            if not failures.waits or not self._worker:  # a reader decides itself
                return False
            self.on_retry()
            time.sleep(failures.backoff.next(time.monotonic(), moves=False))
            return True
        if isinstance(error, errors.Unauthenticated):
            if failures.renewed:
                return False
            failures.renewed = True
            self._credentials.discard_token()
            connection.reopen()
            return True
        silent, lost = isinstance(error, errors.Unreachable | errors.DeadlineExceeded), self._is_lost(error)
        if not silent and not lost:  # a server that has handed its shards over may not know the job any more
            return isinstance(error, WITHOUT_PRIMARY) and self._follow(connection, moves, replaced=False)
        if self._follow(connection, moves, replaced=lost or self._replicated):
            return True
        now = time.monotonic()
        failures.silent_at = now if failures.silent_at is None else failures.silent_at
        if now - failures.silent_at + failures.backoff.at_most > self._retry_for_s:
            if silent:
                raise self._unreachable(connection, error) from None
            return False
        self.on_retry()
        time.sleep(failures.backoff.next(now, moves=lost or self._replicated))
        return True

    def _unreachable(self, connection: ServerConnection, error: errors.ShoalError) -> errors.Unreachable:
        within = f" within {self._retry_for_s:g} s" if self._retry_for_s else ""
        return errors.Unreachable(
            f"a server of {self.placement.job} at {connection.address} did not answer{within} ({error.message}); "
            "check that it is running and that the address is right",
            address=connection.address,
        )

    def _follow(self, connection: ServerConnection, moves: int, *, replaced: bool) -> bool:
        """Finds out where a lock group is after a failed call, and moves connections to where it is.

        Args:
            connection: connection to the lock group.
            moves: how often the connection had been moved when the failed call began.
            replaced: whether to raise StaleGeneration if the placement was replaced. Otherwise the caller waits for the
                server, which may answer again.

        Returns:
            Whether the connection has moved since.

        Raises:
            StaleGeneration: the job has a placement of another generation, or with other lock groups, or its variables
                are not on servers.
        """
        if connection.moves == moves:
            found, gone = self._locator.ask(self.placement, time.monotonic())
            if found is not None:
                self._move(found)
            newer = found is not None and found.generation > self.placement.generation
            if self._is_regrouped() or (replaced and (gone or newer)):
                self.on_retry()  # raises if the job has ended
                raise errors.StaleGeneration(
                    f"job {self.placement.job} is no longer on the servers, or in the lock groups, of its generation "
                    f"{self.placement.generation}; fetch its placement again",
                    job=self.placement.job,
                )
        return connection.moves != moves

    def _on_newest(self, call: Callable[[], T]) -> T:
        """Makes a call, and repeats it with the newest placement if the one in use is old.

        Another thread may make calls and replace the connections meanwhile. The calls on those that it closes are
        repeated as well.
        """
        left = _PLACEMENTS
        while left:
            uses = self._uses
            try:
                return call()
            except errors.StaleGeneration:
                left -= self._renew(uses)
            except errors.Cancelled:
                if self._uses == uses or self._closed.is_set():
                    raise
        raise errors.StaleGeneration(f"the placement of {self.placement.job} keeps changing; try again later")

    def _renew(self, uses: int) -> bool:
        """Changes to the newest placement, unless another thread has done so.

        Args:
            uses: how often the connections had been replaced when the failed call began.

        Returns:
            Whether the placement may be of another generation. There is no bound on how often its groups are split.
        """
        with self._renewing:
            if self._uses != uses:
                return False
            with self._moving:
                known, newer, self._newer = self.placement, self._newer, None
            splits = newer is not None and newer.generation == known.generation
            self._use(newer or self._refresh(), known=self.packer if splits else None)
            return not splits

    def _use(self, placement: Placement, known: Packer | None = None) -> None:
        """Changes to this placement.

        Args:
            placement: the placement.
            known: the packer in use, if the generation stays. The connections of lock groups that stay are then kept.
                All others are new.
        """
        with delayed_gc():
            packer = Packer(placement, known)
        with self._moving:
            earlier = self.connections
            kept = {it.layout: it for it in earlier if not it.closed} if known else {}
            self.packer, self.placement = packer, placement
            self._replicated = self._replicated or _has_copies(placement)
            self.connections = [
                kept.get(layout)
                or ServerConnection(placement.shards[group].address, layout, self._setting, self._credentials)
                for group, layout in packer.groups.items()
            ]
            self._uses += 1
            self._move_to(placement)
        for connection in earlier:
            if connection not in self.connections:
                connection.close()
        if self._closed.is_set():  # meanwhile: `close` may not have seen the new ones
            self._close_all()

    def _is_regrouped(self) -> bool:
        """Returns whether a placement of this generation with other lock groups is known."""
        with self._moving:
            return self._newer is not None and self._newer.generation == self.placement.generation

    def _move(self, found: Placement) -> None:
        """Moves the connections of all lock groups that are on other servers in a newer form of the placement.

        If it has other lock groups, the calls on the present connections fail, and then `_renew` changes to it.
        """
        with self._moving:
            known = self.placement
            if found.generation != known.generation:
                self._newer = found if found.generation > known.generation else None
                return
            if any(new.term < old.term for new, old in zip(found.shards, known.shards, strict=True)):
                return  # an answer that was late
            if found.grouping == known.grouping:
                self.placement = found
            else:
                self._newer = found
            self._replicated = self._replicated or _has_copies(found)
            self._move_to(found)

    def _move_to(self, placement: Placement) -> None:
        """Moves connections to where their lock groups are. Called with `_moving` held."""
        for connection in self.connections:
            address = placement.shards[connection.group].address
            if address != connection.address and not connection.closed:
                _log.info("shards moved to another server", job=placement.job, shard=connection.group, server=address)
                connection.move(address)

    def _watch(self) -> None:
        """Asks where the lock groups are while a call takes long.

        A server that was stopped or cut off closes no connection, so its calls would wait for as long as it is away.
        """
        pause = _LATE_S
        while not self._closed.wait(shortened(pause)):
            now = time.monotonic()
            taken_s = now - min(self._begun.copy().values(), default=now)
            pause = min(max(_LATE_S, _PART * taken_s), _LONGEST_PAUSE_S)
            if taken_s < _LATE_S:
                continue
            found, _ = self._locator.ask(self.placement, now)
            if found is not None:
                self._move(found)


def _has_copies(placement: Placement) -> bool:
    return any(shard.backup or shard.term for shard in placement.shards)


__all__ = ["PlacedServers"]
