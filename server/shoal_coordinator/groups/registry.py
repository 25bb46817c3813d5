"""The groups of a cluster by name, for any thread."""

import threading
import time
from collections.abc import Callable

from shoal import errors
from shoal._limits import catalogue
from shoal.status import GroupStatus
from shoal_coordinator.groups.rank_group import RankCandidate, RankGeneration, RankGroup, RankHeartbeat


class GroupRegistry:
    """All groups. They are in memory only.

    Args:
        clock: returns seconds, and does not go back.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # guards what follows
        self._groups: dict[str, RankGroup] = {}

    def join(
        self,
        name: str,
        candidate: RankCandidate,
        *,
        ranks: int,
        min_ranks: int,
        generation: int = 0,
        submitter: str = "",
    ) -> tuple[RankGeneration | None, str]:
        """Gives a process a place in the next generation of a group: see `RankGroup.join`.

        Args:
            name: name of the group.
            candidate: the process.
            ranks: see `RankGroup`.
            min_ranks: see `RankGroup`.
            generation: the last generation that it has belonged to.
            submitter: name of the user.

        Returns:
            The generation of the process; or None, and what it waits for.

        Raises:
            BadRequest: the processes disagree on the number of ranks, or on their minimum.
            Forbidden: another user has made the group.
            Overloaded: there are too many groups, or too many processes wait.
        """
        with self._lock:
            group = self._group(name, ranks, min_ranks, submitter)
            if candidate.process_id not in group.waiting and len(group.waiting) >= catalogue.GROUP_WAITING.default:
                raise catalogue.GROUP_WAITING.refusal(f"{len(group.waiting)} processes wait for group {name}")
            formed = group.join(self._clock(), candidate, generation)
            return formed, "" if formed else group.waits_for

    def heartbeat(self, name: str, heartbeat: RankHeartbeat, *, ranks: int, min_ranks: int, submitter: str = "") -> str:
        """Records what a rank says: see `RankGroup.heartbeat`.

        Args:
            name: name of the group.
            heartbeat: what it says.
            ranks: see `RankGroup`.
            min_ranks: see `RankGroup`.
            submitter: name of the user.

        Returns:
            Why its generation has ended; empty if it goes on.

        Raises:
            BadRequest, Forbidden, Overloaded: see `join`.
        """
        with self._lock:
            ended = self._group(name, ranks, min_ranks, submitter).heartbeat(self._clock(), heartbeat)
            self._clean()
            return ended

    def statuses(self, ranks: int = 0) -> list[GroupStatus]:
        """Returns the status of all groups, in order of their names.

        Args:
            ranks: the most ranks in the result. The first groups have theirs.
        """
        found: list[GroupStatus] = []
        with self._lock:
            self._clean()
            for name, group in sorted(self._groups.items()):
                found.append(group.status(name, members=group.size <= ranks))
                ranks -= group.size
        return found

    def status(self, name: str) -> GroupStatus:
        """Returns the status of a group.

        Raises:
            UnknownGroup: there is no such group.
        """
        with self._lock:
            self._clean()
            group = self._groups.get(name)
            if group is None:
                raise errors.UnknownGroup(
                    f"there is no elastic group {name!r:.300}; it ends with its last process. `shoal groups` lists all"
                )
            return group.status(name, members=True)

    def _group(self, name: str, ranks: int, min_ranks: int, submitter: str) -> RankGroup:
        group = self._groups.get(name)
        if group:
            group.expire(self._clock())
        if group is None or group.is_empty:  # nobody is left: a new run of the script
            try:
                self._check_room(submitter)
            except errors.Overloaded:
                self._clean()
                self._check_room(submitter)
            group = self._groups[name] = RankGroup(ranks, min_ranks, submitter)
        if group.submitter != submitter:
            raise errors.Forbidden(f"{group.submitter} has made group {name}; choose another name")
        if (group.ranks, group.min_ranks) != (ranks, min_ranks):
            raise errors.BadRequest(
                f"this process wants {ranks} ranks, at least {min_ranks}, but group {name} has {group.ranks}, at "
                f"least {group.min_ranks}; give all processes the same numbers, or choose another name"
            )
        return group

    def _check_room(self, submitter: str) -> None:
        """Checks that a user may make one more group. The share of one user leaves some for others."""
        if (count := len(self._groups)) >= catalogue.MAX_GROUPS.default:
            raise catalogue.MAX_GROUPS.refusal(f"the cluster has {count} groups of ranks", "try again later")
        count = sum(group.submitter == submitter for group in self._groups.values())
        if count >= catalogue.SUBMITTER_GROUPS.default:
            raise catalogue.SUBMITTER_GROUPS.refusal(f"{submitter} has {count} groups of ranks", "end one")

    def _clean(self) -> None:
        now = self._clock()
        for name, group in list(self._groups.items()):
            group.expire(now)
            if group.is_empty:
                del self._groups[name]


__all__ = ["GroupRegistry"]
