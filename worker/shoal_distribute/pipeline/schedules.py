"""Schedules of pipelines: the order in which each stage computes the micro-batches of a step (no I/O, no threads)."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from shoal import errors


@dataclass(frozen=True, slots=True)
class Pass:
    """One pass of a stage over a micro-batch.

    Attributes:
        micro_batch: number of the micro-batch.
        is_forward: whether it is the forward pass, not the backward pass.
    """

    micro_batch: int
    is_forward: bool

    def __str__(self) -> str:
        return f"{'F' if self.is_forward else 'B'}{self.micro_batch}"


class StageSchedule(ABC):
    """Order of the forward and backward passes of each stage.

    All stages compute the micro-batches of one kind of pass in the order of their numbers. So the gradients are added,
    and moving averages are updated, in the order of one process.

    Attributes:
        name: its name.
    """

    name: str

    @abstractmethod
    def held(self, stage: int, stages: int, micro_batches: int) -> int:
        """Returns how many micro-batches a stage holds at most between their forward and backward passes.

        Args:
            stage: number of the stage, from 0.
            stages: number of stages.
            micro_batches: number of micro-batches.
        """

    def passes(self, stage: int, stages: int, micro_batches: int) -> list[Pass]:
        """Returns the passes of a stage in a training step, in order.

        Args:
            stage: number of the stage, from 0.
            stages: number of stages.
            micro_batches: number of micro-batches.
        """
        ahead = self.held(stage, stages, micro_batches)
        found = [Pass(number, is_forward=True) for number in range(ahead)]
        for number in range(micro_batches):
            found.append(Pass(number, is_forward=False))
            if ahead + number < micro_batches:
                found.append(Pass(ahead + number, is_forward=True))
        return found


class GPipe(StageSchedule):
    """All forward passes, then all backward passes (Huang et al., "GPipe", NeurIPS 2019)."""

    name = "gpipe"

    def held(self, stage: int, stages: int, micro_batches: int) -> int:  # noqa: ARG002 - all stages hold the same
        return micro_batches


class OneForwardOneBackward(StageSchedule):
    """One forward pass, then one backward pass, by turns.

    Before that, a stage computes as many forward passes as there are stages behind it. Narayanan et al. describe it as
    PipeDream-Flush ("Memory-efficient pipeline-parallel DNN training", ICML 2021).
    """

    name = "1f1b"

    def held(self, stage: int, stages: int, micro_batches: int) -> int:
        return min(micro_batches, stages - stage)


SCHEDULES: dict[str, StageSchedule] = {it.name: it for it in (GPipe(), OneForwardOneBackward())}


def schedule_of(name: str) -> StageSchedule:
    """Returns the schedule of this name.

    Raises:
        BadRequest: there is no such schedule.
    """
    found = SCHEDULES.get(str(name))  # a list has no hash
    if found is None:
        raise errors.BadRequest(f"schedule is {name!r:.200}; use {' or '.join(map(repr, SCHEDULES))}")
    return found


def split_of(samples: int, micro_batches: int) -> list[slice]:
    """Returns the samples of each micro-batch of a batch. Their numbers differ by at most one.

    Args:
        samples: number of samples of the batch.
        micro_batches: number of micro-batches.
    """
    return [
        slice(samples * number // micro_batches, samples * (number + 1) // micro_batches)
        for number in range(micro_batches)
    ]


__all__ = [
    "SCHEDULES",
    "GPipe",
    "OneForwardOneBackward",
    "Pass",
    "StageSchedule",
    "schedule_of",
    "split_of",
]
