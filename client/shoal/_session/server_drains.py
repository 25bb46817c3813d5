"""Draining of servers by a client: the order, and the wait until a server holds nothing that live jobs need."""

import time
from collections.abc import Callable
from dataclasses import replace

from shoal import errors
from shoal._rpc import CoordinatorClient
from shoal._system import check_seconds, check_type
from shoal.status import ClusterStatus, MemberStatus
from shoal.v1 import coordinator_pb2

# Seconds between two questions of what is left.
_POLL_S = 0.25
# Jobs that a line names; it counts the others.
_MOST_NAMED = 5


class ServerDrains:
    """The part of a client that drains servers."""

    _coordinator: CoordinatorClient
    status: Callable[[], ClusterStatus]

    def drain_server(
        self,
        server: str,
        *,
        stay: bool = False,
        force: bool = False,
        wait: bool = True,
        timeout_s: float | None = None,
        on_progress: Callable[[MemberStatus], object] = lambda _: None,
    ) -> MemberStatus:
        """Moves everything that live jobs need off a server, which then leaves the cluster and ends.

        Jobs move to other servers while they train. A job that cannot move takes a last checkpoint, and restarts from
        it on other servers; if it is a job of sessions, it ends, and its users open it again. There is no limit of
        time: if a job can be neither moved nor saved, the server waits for it.

        Args:
            server: member id of the server.
            stay: whether the server stays in the cluster when it is drained, without shards, until it is stopped.
            force: whether to drain it even if jobs then lose their values, or have no other server.
            wait: whether to wait until the server has left, or with `stay`, until it is drained.
            timeout_s: how long to wait, in seconds. None means no limit. The server drains on after a timeout.
            on_progress: called with the server's status after the order, and then whenever what is left has changed.

        Returns:
            The last status of the server.

        Raises:
            UnknownMember: there is no live member of this id.
            BadRequest: the member is not a server.
            ServerNeeded: jobs would lose their values, or have no other server. Nothing has changed.
            DeadlineExceeded: the server was not drained within `timeout_s`.
            Fenced: the server was lost, or has restarted, before it was drained.
            Forbidden: the caller is not an admin.
        """
        check_type("server", server, str, "the member id of a server, such as 'server-1'")
        check_seconds("timeout_s", timeout_s, optional=True)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        now = self._order_drain(server, stay=stay, force=force)
        on_progress(now)
        while wait and not _is_done(now, stay=stay):
            if deadline is not None and time.monotonic() >= deadline:
                raise errors.DeadlineExceeded(
                    f"{server} was not drained within {timeout_s:g} s: {what_is_left(now)}. It drains on, and "
                    "`shoal status` shows it",
                    member=server,
                )
            time.sleep(_POLL_S if deadline is None else min(_POLL_S, max(0.0, deadline - time.monotonic())))
            before, now = now, self._drained_so_far(now)
            if what_is_left(now) != what_is_left(before):
                on_progress(now)
        return now

    def _order_drain(self, server: str, *, stay: bool, force: bool) -> MemberStatus:
        # A repeat of the call may arrive after the server has left, and must not drain its next incarnation.
        known = self._find(server)
        incarnation = known.incarnation if known else 0
        request = coordinator_pb2.DrainServerRequest(member=server, incarnation=incarnation, stay=stay, force=force)
        return MemberStatus.from_proto(self._coordinator.call(self._coordinator.members.DrainServer, request).server)

    def _drained_so_far(self, before: MemberStatus) -> MemberStatus:
        """Returns the status of a draining server now.

        Raises:
            Fenced: it has ended before it was drained.
        """
        now = self._find(before.member)
        if now and now.incarnation == before.incarnation and (now.alive or now.drained):
            return now
        if before.drained:  # it has left, and may have returned
            return replace(before, alive=False)
        raise errors.Fenced(
            f"{before.member} has ended before it was drained: {what_is_left(before)} at the latest question. These "
            "jobs continue with backups or from checkpoints; `shoal jobs` shows them",
            member=before.member,
        )

    def _find(self, server: str) -> MemberStatus | None:
        return next((it for it in self.status().members if it.member == server), None)


def what_is_left(server: MemberStatus) -> str:
    """Returns what a draining server still has to wait for, in words."""
    jobs, groups = server.waiting_jobs, server.moving_groups
    if not jobs:
        return "no job needs it" if server.drained else "its jobs are not known"
    named = ", ".join(jobs[:_MOST_NAMED]) + (f" and {len(jobs) - _MOST_NAMED} more" if len(jobs) > _MOST_NAMED else "")
    moving = f", {groups} lock group{'s' * (groups > 1)} to move" if groups else ""
    return f"{len(jobs)} job{'s' * (len(jobs) > 1)} left ({named}){moving}"


def _is_done(server: MemberStatus, *, stay: bool) -> bool:
    return server.drained and (stay or not server.alive)


__all__ = ["ServerDrains", "what_is_left"]
