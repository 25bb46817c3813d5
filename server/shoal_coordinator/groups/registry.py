"""The groups of a cluster by name, for any thread."""

import threading
import time
from collections.abc import Callable

from shoal import errors
from shoal._limits import catalogue
from shoal_coordinator.groups.rank_group import RankBeat, RankCandidate, RankGeneration, RankGroup


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
        self, name: str, candidate: RankCandidate, *, ranks: int, least: int, generation: int = 0, owner: str = ""
    ) -> tuple[RankGeneration | None, str]:
        """Gives a process a place in the next generation of a group: see `RankGroup.join`.

        Args:
            name: name of the group.
            candidate: the process.
            ranks: see `RankGroup`.
            least: see `RankGroup`.
            generation: the last generation that it has belonged to.
            owner: name of the user.

        Returns:
            The generation of the process, or None; and then what it waits for.

        Raises:
            BadRequest: the processes disagree on the number of ranks.
            Forbidden: another user has made the group.
            Overloaded: there are too many groups, or too many processes wait.
        """
        with self._lock:
            group = self._group(name, ranks, least, owner)
            if candidate.member not in group.waiting and len(group.waiting) >= catalogue.GROUP_WAITING.default:
                raise catalogue.GROUP_WAITING.refusal(f"{len(group.waiting)} processes wait for group {name}")
            formed = group.join(self._clock(), candidate, generation)
            return formed, "" if formed else group.waits_for

    def beat(self, name: str, beat: RankBeat, *, ranks: int, least: int, owner: str = "") -> str:
        """Records what a rank says: see `RankGroup.beat`.

        Args:
            name: name of the group.
            beat: what it says.
            ranks: see `RankGroup`.
            least: see `RankGroup`.
            owner: name of the user.

        Returns:
            Why its generation has ended; empty if it goes on.

        Raises:
            BadRequest, Forbidden, Overloaded: see `join`.
        """
        with self._lock:
            ended = self._group(name, ranks, least, owner).beat(self._clock(), beat)
            self._clean()
            return ended

    def _group(self, name: str, ranks: int, least: int, owner: str) -> RankGroup:
        group = self._groups.get(name)
        if group:
            group.expire(self._clock())
        if group is None or group.is_empty:  # nobody is left: a new run of the script
            if len(self._groups) >= catalogue.MAX_GROUPS.default:
                self._clean()
            if len(self._groups) >= catalogue.MAX_GROUPS.default:
                raise catalogue.MAX_GROUPS.refusal(f"the cluster has {len(self._groups)} groups of ranks")
            group = self._groups[name] = RankGroup(ranks, least, owner)
        if group.owner != owner:
            raise errors.Forbidden(f"{group.owner} has made group {name}; choose another name")
        if group.ranks != ranks:
            raise errors.BadRequest(
                f"this process wants {ranks} ranks, but group {name} has {group.ranks}; give all processes the same "
                "number, or choose another name"
            )
        return group

    def _clean(self) -> None:
        now = self._clock()
        for name, group in list(self._groups.items()):
            group.expire(now)
            if group.is_empty:
                del self._groups[name]


__all__ = ["GroupRegistry"]
