"""Lock groups that a simulated server hosts, and the errors of callers that know other groups, as `HostedGroups`."""

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TypeVar

from shoal import errors
from shoal_server.shards.group.pending_split import check_parts
from simulation.messages import SplitGroup
from simulation.nodes.replica import Replica

T = TypeVar("T")


class Hosted:
    """The lock groups of one process of a server, with the backups.

    Args:
        server: name of the server.

    Attributes:
        by_job: the groups by job and number.
    """

    def __init__(self, server: str) -> None:
        self._server = server
        self.by_job: dict[str, dict[int, Replica]] = {}

    @property
    def all(self) -> list[Replica]:
        """All groups."""
        return [group for groups in self.by_job.values() for group in groups.values()]

    def held(self, job: str) -> dict[int, Replica]:
        """Returns the groups of a job by number; empty if there are none."""
        return self.by_job.get(job, {})

    def of_job(self, job: str) -> dict[int, Replica]:
        """Returns the groups of a job by number, or raises UnknownJob."""
        groups = self.by_job.get(job)
        if not groups:
            raise errors.UnknownJob(f"{job} has no shards on {self._server}")
        return groups

    def group(self, job: str, generation: int | None, shards: Sequence[int]) -> Replica:
        """Returns the group of some shards. A planted bug gives no generation."""
        groups = self.of_job(job)
        first = next(iter(groups.values()))
        self._check_generation(first, generation)
        if len(groups) == 1:
            return first  # `check_whole` checks the shards
        found = [group for group in groups.values() if group.shards.issuperset(shards)]
        if found:
            return min(found, key=lambda group: group.follows)  # a backup may be of an earlier grouping
        known = any(group.shards.intersection(shards) for group in groups.values())
        raise (errors.Moved if known else errors.UnknownShard)(
            f"{self._server} has the lock groups {sorted(groups)}, none of which has the shards {list(shards)}"
        )

    def numbered(self, job: str, generation: int, number: int) -> Replica:
        """Returns a group by its number. It may be a backup."""
        group = self.of_job(job).get(number)
        if group is None:
            raise errors.UnknownShard(f"{self._server} does not have lock group {number} of {job}")
        self._check_generation(group, generation)
        return group

    def groups_of(self, job: str, generation: int | None = None) -> list[Replica]:
        """Returns the groups of a job of which this server is the primary."""
        groups = [group for _, group in sorted(self.of_job(job).items()) if not group.follows]
        if not groups:
            raise errors.Moved(f"{self._server} has only backups of {job}")
        self._check_generation(groups[0], generation)
        return groups

    async def on_groups(
        self, job: str, call: Callable[[list[Replica]], Awaitable[T]], generation: int | None = None
    ) -> T:
        """Makes a call that concerns all groups of a job here. Repeats it if they have changed meanwhile."""
        while True:
            groups = self.groups_of(job, generation)
            try:
                return await call(groups)
            except errors.Moved:
                if self.groups_of(job, generation) == groups:
                    raise

    def _divide(self, group: Replica, rest: Replica, part: Replica) -> None:
        held = self.held(group.config.job)
        if held.get(group.number) is not group:
            raise errors.UnknownJob(f"{group.config.job} was dropped while lock group {group.number} was being split")
        held[rest.number], held[part.number] = rest, part

    async def split(self, request: SplitGroup, is_wanted: Callable[[], bool]) -> None:
        """Makes two lock groups of one, as `ShardStore.split` does."""
        about = request.job, request.group, request.shards, request.term
        check_parts(request.job, request.group, request.shards)
        group = self.numbered(request.job, request.generation, request.group)
        if self._is_split(*about):
            return
        try:
            await group.split(request.shards, request.term, partial(self._divide, group), is_wanted)
        except errors.Moved:
            if not self._is_split(*about):  # by another call
                raise

    def _is_split(self, job: str, number: int, shards: Sequence[int], term: int) -> bool:
        groups = self.of_job(job)
        rest, part = groups.get(number), groups.get(min(shards))
        if not rest or not part or min(rest.term, part.term) < term or rest.shards.intersection(shards):
            return False
        return part.shards == set(shards)

    def remove(self, group: Replica) -> None:
        """Frees a group."""
        groups = self.held(group.config.job)
        if groups.get(group.number) is group:
            del groups[group.number]
        group.close()

    def take_all(self) -> list[Replica]:
        """Removes all groups, and returns them."""
        groups, self.by_job = self.all, {}
        return groups

    def _check_generation(self, group: Replica, generation: int | None) -> None:
        if generation is not None and group.generation != generation:
            raise errors.StaleGeneration(f"{self._server} has generation {group.generation}, not {generation}")


def check_whole(group: Replica, shards: Sequence[int]) -> None:
    """Raises an error unless a worker's call names all shards of a group, as `Selection` does."""
    missing = [shard for shard in shards if shard not in group.shards]
    if missing and len(missing) == len(shards):
        raise errors.UnknownShard(f"{group.server} does not have the shards {missing}")
    if missing or len(shards) < len(group.shards):
        wrong = f"{group.server} has {sorted(group.shards)} in lock group {group.number}, the call names {list(shards)}"
        raise errors.Moved(wrong) if missing or group.term else errors.BadRequest(wrong)


__all__ = ["Hosted", "check_whole"]
