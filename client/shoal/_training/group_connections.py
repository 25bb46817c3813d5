"""Group connections: a connection to each lock group of a placement, and changes of the placement.

A lock group that moves to another server keeps its connection. If a group is split, its parts have new connections, and
so have all groups of a placement of another generation.
"""

import threading
from collections.abc import Callable

from shoal._memory.gc_control import delayed_gc
from shoal._security import Credentials
from shoal._system.logs import Log
from shoal._transport import ServerConnection
from shoal._wire import Packer, Placement

_log = Log(__name__)


class GroupConnections:
    """One connection to each lock group of a job, for one participant.

    Args:
        placement: placement of the job.
        refresh: returns the placement again when servers report that this one is old.
        setting: selects transports, as SHOAL_TRANSPORT does.
        credentials: what this process presents to the servers.
        replicated: whether the job has backups.

    Attributes:
        placement: the placement in use.
        packer: packer of the placement's generation.
        connections: one connection for each lock group, in the placement's order.
        replicated: whether the job has backups, as far as known.
        uses: how often the connections were replaced.
        closed: set by `close`.
    """

    def __init__(
        self,
        placement: Placement,
        *,
        refresh: Callable[[], Placement],
        setting: str,
        credentials: Credentials,
        replicated: bool,
    ) -> None:
        self._refresh, self._setting, self._credentials = refresh, setting, credentials
        self._renewing = threading.Lock()  # held while the connections are replaced; _moving is taken under it
        # Guards all that follows except `closed`. Values are replaced, not changed, so they are read without the lock.
        self._moving = threading.Lock()
        self._newer: Placement | None = None  # of another generation, or with other lock groups
        self.placement, self.replicated, self.uses = placement, replicated, 0
        self.connections: list[ServerConnection] = []
        self.packer: Packer
        self.closed = threading.Event()
        self.use(placement)

    def renew(self, uses: int) -> bool:
        """Changes to the newest placement, unless another thread has done so.

        Args:
            uses: how often the connections had been replaced when the failed call began.

        Returns:
            Whether the placement may be of another generation. There is no bound on how often its groups are split.
        """
        with self._renewing:
            if self.uses != uses:
                return False
            with self._moving:
                known, newer, self._newer = self.placement, self._newer, None
            splits = newer is not None and newer.generation == known.generation
            self.use(newer or self._refresh(), known=self.packer if splits else None)
            return not splits

    def use(self, placement: Placement, known: Packer | None = None) -> None:
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
            self.replicated = self.replicated or _has_copies(placement)
            self.connections = [
                kept.get(layout)
                or ServerConnection(placement.shards[group].address, layout, self._setting, self._credentials)
                for group, layout in packer.groups.items()
            ]
            self.uses += 1
            self._move_to(placement)
        for connection in earlier:
            if connection not in self.connections:
                connection.close()
        if self.closed.is_set():  # meanwhile: `close` may not have seen the new ones
            self._close_all()

    @property
    def is_regrouped(self) -> bool:
        """Whether a placement of this generation with other lock groups is known."""
        with self._moving:
            return self._newer is not None and self._newer.generation == self.placement.generation

    def move(self, found: Placement) -> None:
        """Moves the connections of all lock groups that are on other servers in a newer form of the placement.

        If it has other lock groups, the calls on the present connections fail, and then `renew` changes to it.
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
            self.replicated = self.replicated or _has_copies(found)
            self._move_to(found)

    def _move_to(self, placement: Placement) -> None:
        """Moves connections to where their lock groups are. Called with `_moving` held."""
        for connection in self.connections:
            address = placement.shards[connection.group].address
            if address != connection.address and not connection.closed:
                _log.info("shards moved to another server", job=placement.job, shard=connection.group, server=address)
                connection.move(address)

    def close(self) -> None:
        """Closes all connections. Calls in progress end with Cancelled."""
        self.closed.set()
        self._close_all()

    def _close_all(self) -> None:
        for connection in self.connections:
            connection.close()


def _has_copies(placement: Placement) -> bool:
    return any(shard.backup or shard.term for shard in placement.shards)


__all__ = ["GroupConnections"]
