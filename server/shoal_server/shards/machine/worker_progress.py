"""The progress of a worker on a shard."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerProgress:
    """The progress of an admitted worker on a shard.

    Attributes:
        incarnation: the worker's incarnation.
        committed: 1 + the last step that it committed; 0 if none.
        finished: number of steps that it has finished or skipped.
    """

    incarnation: int
    committed: int
    finished: int

    def joined(self, other: "WorkerProgress") -> "WorkerProgress":
        """Returns the larger of the two numbers in each field. If the incarnations differ, the later one's progress."""
        if self.incarnation != other.incarnation:
            return max(self, other, key=lambda progress: progress.incarnation)
        return WorkerProgress(
            self.incarnation, max(self.committed, other.committed), max(self.finished, other.finished)
        )


__all__ = ["WorkerProgress"]
