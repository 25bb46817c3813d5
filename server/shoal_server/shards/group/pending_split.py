"""Pending split: a split of a lock group, which is made at a moment that the group chooses."""

from collections.abc import Callable, Sequence

from shoal import errors
from shoal_server.shards.group.pending_moment import PendingMoment

# Seconds between two looks at whether a group without calls can be split.
LOOK_AGAIN_S = 0.25


class PendingSplit(PendingMoment):
    """A split of a lock group. The group ends it once, with `attempt` or `refuse`, while another thread waits.

    Args:
        job: name of the job, for messages.
        split: splits the group. If it raises an error, it has changed nothing.
    """

    def __init__(self, job: str, split: Callable[[], object]) -> None:
        super().__init__(job)
        self._split = split

    def attempt(self) -> bool:
        """Splits the group, whose lock is held. Returns whether that was done; if not, it has failed."""
        try:
            self._split()
        except errors.ShoalError as error:
            self._error = error
        except Exception as error:
            self._error = errors.InternalError(
                f"{self._job}: a lock group could not be split: {type(error).__name__}: {error}"
            )
        self._ended.set()
        return self._error is None

    def wait(self, within_s: float) -> bool:
        """Waits for the end, and returns whether the group is split; False if there is no end in time.

        Args:
            within_s: seconds to wait at most.

        Raises:
            ShoalError: why it has failed.
        """
        return self._await_end(within_s)


def check_parts(job: str, group: int, shards: Sequence[int]) -> None:
    """Checks which shards are to leave a lock group.

    Args:
        job: name of the job, for messages.
        group: name of the group.
        shards: the shards that leave it.

    Raises:
        BadRequest: there are none, one is named twice, or the one that names the group is among them.
    """
    if not shards or len(set(shards)) != len(shards):
        problem = "name at least one shard, and each only once"
    elif min(shards) <= group:
        problem = f"lock group {group} keeps its smallest shard, {group}; name later shards"
    else:
        return
    raise errors.BadRequest(f"the shards {list(shards)} of {job} cannot leave lock group {group}: {problem}")


__all__ = ["LOOK_AGAIN_S", "PendingSplit", "check_parts"]
