"""Rank mesh: which stage, which replica and which part of split layers each rank of a pipeline computes."""

import math

from shoal import errors
from shoal._system import check_count
from shoal_distribute.tensor_parallel.device_mesh import DeviceMesh


class RankMesh(DeviceMesh):
    """The ranks of a pipeline in several processes, with the axes "replica", "stage" and "model".

        mesh = RankMesh(stages=2, replicas=2, split=2)
        mesh.coordinates(5)                     # {"replica": 1, "stage": 0, "model": 1}
        mesh.line(5), mesh.peers(5)             # (5, 7), (1, 5)
        mesh.split_group(5)                     # (4, 5)

    The ranks that split a layer exchange the most data, so their numbers follow each other. After them come the stages
    of a replica, and the replicas last.

    Args:
        stages: number of stages.
        replicas: number of replicas of the pipeline.
        split: number of ranks that compute one stage of one replica, each with its part of the split layers.

    Raises:
        BadRequest: an argument is no whole number of 1 or more.
    """

    def __init__(self, stages: int, replicas: int = 1, split: int = 1) -> None:
        axes = {
            "replica": check_count("replicas", replicas, 1),
            "stage": check_count("stages", stages, 1),
            "model": check_count("split", split, 1),
        }
        super().__init__(axes, range(math.prod(axes.values())))

    def line(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that a rank passes activations to or gets them from, by stage, itself included."""
        return self._along(rank, "stage")

    def peers(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that have the gradients of the same variables, by replica, itself included."""
        return self._along(rank, "replica")

    def split_group(self, rank: int) -> tuple[int, ...]:
        """Returns the ranks that have the other parts of the same split layers, by part, itself included."""
        return self._along(rank, "model")

    def described(self, rank: int) -> str:
        """Returns what a rank computes, as text."""
        place = self.coordinates(rank)
        part = f"part {place['model']} of " if self.length("model") > 1 else ""
        return f"{part}stage {place['stage']} of replica {place['replica']}"

    def shown(self) -> str:
        """Returns the mesh as text."""
        split = f" (each stage split over {self.length('model')} ranks)" if self.length("model") > 1 else ""
        return f"{self.length('stage')} stages with {self.length('replica')} replicas{split}"

    def check_ranks(self, ranks: int) -> None:
        """Raises BadRequest unless there is a rank for each point.

        Args:
            ranks: number of ranks.
        """
        if ranks != self.size:
            each = "stage of each replica" if self.length("model") == 1 else "part of each stage of each replica"
            raise errors.BadRequest(
                f"there are {ranks} processes, but {self.shown()} need {self.size}; start a process for each {each}"
            )

    def _along(self, rank: int, axis: str) -> tuple[int, ...]:
        return tuple(int(it) for it in self.group_of(rank, axis))


__all__ = ["RankMesh"]
