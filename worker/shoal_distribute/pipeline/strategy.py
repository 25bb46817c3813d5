"""PipelineStrategy: a model in stages, each on a device of its own."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry

from shoal import _tracing, errors, optim
from shoal._system import check_count
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice, logical_devices
from shoal_distribute.pipeline.model_stages import check_samples
from shoal_distribute.pipeline.stage_metrics import StageMetrics
from shoal_distribute.pipeline.stage_threads import StageThreads
from shoal_distribute.pipeline.staged import StagedStrategy, settings_of
from shoal_distribute.pipeline.timings import PipelineTimings
from shoal_distribute.pipeline.variables import StageVariable
from shoal_distribute.replica_context import ReplicaContext
from shoal_distribute.tensor_parallel import SplitPlace
from shoal_distribute.values import DistributedVariable


class PipelineStrategy(StagedStrategy):
    """One model, cut into stages on several devices, through which a batch flows in micro-batches.

        strategy = PipelineStrategy(stages=4, micro_batches=8)
        with strategy.scope():
            model = make_model()  # a Sequential or functional model
            model.compile("adam", "mse")
        model.fit(x, y, batch_size=64)

    The result is that of one process that adds up the gradients of the same micro-batches. Only the steps of models
    (`fit`, `evaluate`, `predict` and the like) run in stages; a loop of your own with `GradientTape` computes the whole
    model on the first device.

    Args:
        devices: the devices of the stages, in order, such as ["/gpu:0", "/gpu:1"]. None means the first GPUs of this
            machine, or "/cpu:0" and so on if it has none.
        stages: number of stages, if no devices are given.
        micro_batches: number of micro-batches of a training step. If they do not divide a batch, their numbers of
            samples differ by one, and each sample counts the same.
        schedule: "1f1b" or "gpipe": the order of the forward and backward passes.
        recompute: whether a stage keeps only its inputs, and computes its activations again for the backward pass.
        cut: the names of the first layers of all stages but the first; or the number of layers of each stage. None
            means a cut by costs that are measured with the first batch.
        memory_limit: bytes that a stage may hold: variables, gradients, optimizer slots, and what backward passes need.
            A sequence has one number for each device. None means any.
        carry_residuals: whether several values may cross a cut, as in a cut through a residual connection.

    Attributes:
        stage_devices: the devices of the stages.

    Raises:
        BadRequest: an argument is invalid.
        DeviceUnavailable: there is no such device.
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        stages: int | None = None,
        *,
        micro_batches: int = 8,
        schedule: str = "1f1b",
        recompute: bool = False,
        cut: Sequence[str | int] | None = None,
        memory_limit: int | Sequence[int] | None = None,
        carry_residuals: bool = True,
    ) -> None:
        self.stage_devices = _stage_devices(devices, stages)
        settings = settings_of(self.stage_devices, micro_batches, schedule, recompute, memory_limit)
        _tracing.start("client")
        super().__init__(StageThreads(self.stage_devices), settings, cut, carry_residuals)

    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        return StageVariable(self, name, initial, trainable=trainable)

    def create_split_variable(
        self, name: str, initial: np.ndarray, *, trainable: bool = True, place: SplitPlace
    ) -> DistributedVariable:
        return StageVariable(self, name, initial, trainable=trainable, split=place)

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...] = (), kwargs: Any = None, options: Any = None) -> Any:
        with _tracing.root("run", stages=len(self.stage_devices)):
            return super().run(fn, args, kwargs, options)

    experimental_run_v2 = run

    def check_batch(self, samples: int) -> None:
        check_samples(samples, self._settings.micro_batches)

    def register_metrics(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Adds the metrics of the stages, `shoal_pipeline_*`, to a registry that the script serves.

        Args:
            registry: the registry. The default is that of `prometheus_client.start_http_server`.
        """
        registry.register(StageMetrics(lambda: self._known_timings() or PipelineTimings(0, 0.0, ())))

    def _apply(
        self,
        replica: ReplicaContext,
        optimizer: optim.Optimizer,
        variables: list[DistributedVariable],
        arrays: list[Array],
    ) -> None:
        del replica
        parts: list[list[tuple[StageVariable, Array]]] = [[] for _ in self.stage_devices]
        for variable, array in zip(variables, arrays, strict=True):
            placed = cast(StageVariable, variable)
            parts[placed.stage].append((placed, array))
        self._optimizers.update(self, optimizer, parts)


def _stage_devices(devices: Sequence[str] | None, stages: int | None) -> tuple[LogicalDevice, ...]:
    """Returns the device of each stage."""
    if devices is not None:
        found = logical_devices(devices)
        if stages not in {None, len(found)}:
            raise errors.BadRequest(f"stages is {stages}, but there are {len(found)} devices; give one of the two")
        return found
    if stages is not None:
        check_count("stages", stages, 1)
    found = logical_devices(None)
    if stages is None:
        return found
    if not found[0].is_gpu:
        return logical_devices([f"/cpu:{number}" for number in range(stages)])
    if len(found) < stages:
        raise errors.DeviceUnavailable(
            f"{stages} stages need as many devices, but this machine has {len(found)} GPUs; give devices, which may be "
            'CPUs, such as ["/gpu:0", "/cpu:0"]'
        )
    return found[:stages]


__all__ = ["PipelineStrategy"]
