"""Timings of a pipeline: where the time of its training steps goes."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.status import Bubble


@dataclass(frozen=True)
class StageTimings:
    """What one stage did in the training steps so far.

    Attributes:
        stage: its number.
        device: name of its device.
        layers: names of its layers.
        compute_s: seconds in which it computed.
        wait_s: seconds in which it waited for other stages.
        fixed_bytes: bytes of its variables, their gradients and their optimizer slots.
        peak_bytes: the most bytes that it has held: the fixed ones, and what the backward passes need.
        peak_held: the most micro-batches that it has held between their forward and backward passes.
    """

    stage: int
    device: str
    layers: tuple[str, ...]
    compute_s: float
    wait_s: float
    fixed_bytes: int
    peak_bytes: int
    peak_held: int

    @property
    def bubble(self) -> float:
        """The share of the time of the steps in which it waited for other stages. 0 before the first step."""
        seconds = self.compute_s + self.wait_s
        return self.wait_s / seconds if seconds else 0.0


@dataclass(frozen=True)
class PipelineTimings:
    """What all stages did in the training steps so far, without the updates by the optimizer. `str` makes a table.

    Attributes:
        steps: number of training steps.
        seconds: their duration.
        stages: the stages.
        micro_batches: number of micro-batches of a step.
    """

    steps: int
    seconds: float
    stages: tuple[StageTimings, ...]
    micro_batches: int = 1

    @property
    def bubble(self) -> float:
        """The share of the time of all stages in which they waited."""
        waited = sum(stage.wait_s for stage in self.stages)
        return waited / (self.seconds * len(self.stages)) if self.seconds else 0.0

    @property
    def ideal_bubble(self) -> float:
        """The bubble of equal stages. `shoal.status.ideal_bubble` computes that of other numbers of micro-batches."""
        return self._compared.ideal

    @property
    def slowest(self) -> StageTimings:
        """The stage that computed longest."""
        return max(self.stages, key=lambda stage: stage.compute_s)

    def __str__(self) -> str:
        rows = ["stage   compute      wait   bubble   MB at most   held   device   layers   (seconds of all steps)"]
        rows += [
            f"{it.stage:5}{it.compute_s:10.3f}{it.wait_s:10.3f}{it.bubble:9.3f}{it.peak_bytes / 1e6:13.2f}"
            f"{it.peak_held:7}   {it.device}   {layers_shown(it.layers)}"
            for it in self.stages
        ]
        ended = f"{self.steps} steps; stage {self.slowest.stage} is the slowest"
        return "\n".join([*rows, ended, str(self._compared)])

    @property
    def _compared(self) -> Bubble:
        return Bubble(self.bubble, max(1, len(self.stages)), self.micro_batches)


def layers_shown(names: Sequence[str]) -> str:
    """Returns consecutive layers as text: the first and the last of them.

    Args:
        names: their names.
    """
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


__all__ = ["PipelineTimings", "StageTimings", "layers_shown"]
