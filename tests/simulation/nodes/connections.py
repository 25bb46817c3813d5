"""Connections of a simulated trainer to the lock groups of its job, and the calls that it repeats.

It does what `GroupConnections`, `RepeatedCalls` and `PlacedServers` of `shoal._training` do, without sockets.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shoal import errors
from shoal._training.failover import WITHOUT_PRIMARY, AttemptBackoff
from shoal._wire import Placement
from simulation import messages
from simulation.nodes.node import RETRY_FOR_S
from simulation.plan import COORDINATOR
from simulation.scheduler import Life, all_of

if TYPE_CHECKING:
    from simulation.nodes.node import Node

PULL_TIMEOUT_S = 10.0
_CALL_TIMEOUT_S, _LOCATE_TIMEOUT_S = 5.0, 2.0
_PLACEMENTS = 3
# Seconds after which a pull from a lost server is repeated, if there is a backup.
_WATCHED_S = 3.0


@dataclass(eq=False)
class Connection:
    """A connection to a lock group.

    Attributes:
        group: name of the group.
        shards: its shards.
        server: the server that is called.
        moves: how often the server was changed.
    """

    group: int
    shards: tuple[int, ...]
    server: str
    moves: int = 0


@dataclass
class _Failures:
    """The failed attempts of one call."""

    backoff: AttemptBackoff
    silent_at: float | None = field(default=None)


Request = Callable[[Connection], Any]


class Connections:
    """One connection to each lock group of a placement.

    Args:
        node: the worker.
        life: the process of the trainer.
        job: name of the job.
        placement: the placement.
        on_retry: called for each repeated call, and raises an error if the job has ended.
        ask: asks the coordinator, and repeats the call while it does not answer.

    Attributes:
        placement: the placement in use.
        all: the connections.
        replicated: whether the job has backups, as far as known.
    """

    def __init__(
        self,
        node: "Node",
        life: Life,
        job: str,
        placement: Placement,
        on_retry: Callable[[], Awaitable[object]],
        ask: Callable[[Any], Awaitable[Any]],
    ) -> None:
        self._node, self._life, self._job, self._on_retry, self._ask = node, life, job, on_retry, ask
        self._newer: Placement | None = None  # with other lock groups
        self.all: list[Connection] = []
        self.replicated = node.world.plan.replicas > 1
        self._use(placement)

    async def each(self, request: Request, *, waits: bool = False) -> list[Any]:
        """Calls every lock group in parallel. If the grouping is old, takes the new one and repeats all calls."""
        return await self.each_with(lambda connection: self.call(connection, request, waits=waits))

    async def each_with(self, call: Callable[[Connection], Any]) -> list[Any]:
        """Makes a call for every lock group, as `each` does."""
        left = _PLACEMENTS
        while left:
            try:
                tasks = [self._node.scheduler.spawn(self._life, call(connection)) for connection in self.all]
                return await all_of(task.result for task in tasks)
            except errors.StaleGeneration:
                left -= await self._renew()
        raise errors.StaleGeneration("the placement keeps changing")

    async def call(self, connection: Connection, request: Request, *, waits: bool = False) -> Any:
        """Calls a lock group, and repeats the call while that may help, as `RepeatedCalls.retrying` does."""
        node, failures = self._node, None
        while True:
            moves = connection.moves
            timeout_s = _CALL_TIMEOUT_S if not waits else _WATCHED_S if self.replicated else PULL_TIMEOUT_S
            try:
                return await node.call(connection.server, request(connection), timeout_s, self._life)
            except errors.ShoalError as error:
                backoff = AttemptBackoff(node.clock.monotonic(), node.scheduler.random.random)
                failures = failures or _Failures(backoff)
                if isinstance(error, errors.DeadlineExceeded) and waits:
                    if self.replicated:
                        await self._follow(connection, moves, replaced=False)
                elif not await self._repeats(error, failures, connection, moves):
                    raise

    async def _repeats(self, error: errors.ShoalError, failures: _Failures, connection: Connection, moves: int) -> bool:
        silent = isinstance(error, errors.Unreachable | errors.DeadlineExceeded)
        lost = isinstance(error, errors.Moved) or (self.replicated and isinstance(error, WITHOUT_PRIMARY))
        if not silent and not lost:
            return isinstance(error, WITHOUT_PRIMARY) and await self._follow(connection, moves, replaced=False)
        if await self._follow(connection, moves, replaced=lost or self.replicated):
            return True
        now = self._node.clock.monotonic()
        failures.silent_at = now if failures.silent_at is None else failures.silent_at
        if now - failures.silent_at + failures.backoff.at_most > RETRY_FOR_S:
            if silent:
                raise errors.Unreachable(f"{connection.server} did not answer: {error.message}") from None
            return False
        await self._on_retry()
        await self._node.sleep(failures.backoff.next(now, moves=lost or self.replicated))
        return True

    async def _follow(self, connection: Connection, moves: int, *, replaced: bool) -> bool:
        """Finds out where a lock group is. Returns whether its connection has moved."""
        if connection.moves == moves:
            found, gone = await self._locate()
            if found:
                self._move(found)
            newer = found is not None and found.generation > self.placement.generation
            regrouped = self._newer is not None
            if regrouped or (replaced and (gone or newer)):
                await self._on_retry()
                raise errors.StaleGeneration("the job is no longer on the servers, or in the groups, of its generation")
        return connection.moves != moves

    async def _locate(self) -> tuple[Placement | None, bool]:
        """Returns the placement, and whether the coordinator says that the variables are not on servers any more."""
        request = messages.Placements(self._job)
        try:
            return await self._node.call(COORDINATOR, request, _LOCATE_TIMEOUT_S, self._life), False
        except (errors.NotPlaced, errors.UnknownJob):
            return None, True
        except errors.ShoalError:  # the coordinator may be away; the servers go on without it
            return None, False

    # Changes of the placement.

    async def _renew(self) -> bool:
        """Changes to the newest placement. Returns whether it has the same lock groups.

        Raises:
            StaleGeneration: the job was placed again, which has ended the worker's part in it.
        """
        newer, self._newer = self._newer, None
        found: Placement = newer or await self._ask(messages.Placements(self._job))
        if found.generation != self.placement.generation:
            raise errors.StaleGeneration(f"the job was placed again, as generation {found.generation}")
        self._use(found, keeps=newer is not None)
        return newer is None

    def _use(self, placement: Placement, *, keeps: bool = False) -> None:
        kept = {(it.group, it.shards): it for it in self.all} if keeps else {}
        parts = {
            group: tuple(it.layout.shard for it in shards) for group, shards in sorted(placement.by_group().items())
        }
        self.placement = placement
        self.replicated = self.replicated or _has_copies(placement)
        self.all = [
            kept.get((group, shards)) or Connection(group, shards, placement.shards[group].server)
            for group, shards in parts.items()
        ]
        self._move_to(placement)

    def _move(self, found: Placement) -> None:
        known = self.placement
        if found.generation != known.generation:
            return
        if any(new.term < old.term for new, old in zip(found.shards, known.shards, strict=True)):
            return  # an answer that was late
        if found.grouping == known.grouping:
            self.placement = found
        else:
            self._newer = found
        self.replicated = self.replicated or _has_copies(found)
        self._move_to(found)

    def _move_to(self, placement: Placement) -> None:
        for connection in self.all:
            server = placement.shards[connection.group].server
            if server != connection.server:
                connection.server = server
                connection.moves += 1


def _has_copies(placement: Placement) -> bool:
    return any(shard.backup or shard.term for shard in placement.shards)


__all__ = ["Connection", "Connections"]
