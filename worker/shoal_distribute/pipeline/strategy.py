"""PipelineStrategy: a model in stages, each on a device of its own."""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any, cast

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry

from shoal import errors, optim
from shoal._system import check_count
from shoal.program import Array
from shoal_distribute.cross_device_ops import RingAllReduce
from shoal_distribute.devices import LogicalDevice, logical_devices
from shoal_distribute.keras.layers.base import as_tensor
from shoal_distribute.keras.models.model import Model
from shoal_distribute.keras.models.sequential import Sequential
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.local_optimizers import slots_of
from shoal_distribute.pipeline.costs import measured_costs
from shoal_distribute.pipeline.cut import Places, checked_cut, cut_as_given, cut_by_cost
from shoal_distribute.pipeline.graph import Graph
from shoal_distribute.pipeline.links import settle
from shoal_distribute.pipeline.model_stages import PipelinedModel, PipelineSettings, check_samples
from shoal_distribute.pipeline.schedules import schedule_of, split_of
from shoal_distribute.pipeline.stage_metrics import StageMetrics
from shoal_distribute.pipeline.stage_optimizers import StageOptimizers
from shoal_distribute.pipeline.stage_threads import StageThreads
from shoal_distribute.pipeline.timings import PipelineTimings
from shoal_distribute.pipeline.variables import StageVariable
from shoal_distribute.replica_context import ReplicaContext, current_replica
from shoal_distribute.strategies import Strategy
from shoal_distribute.values import DistributedVariable, check_scope


class PipelineStrategy(Strategy):
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
        super().__init__(self.stage_devices[:1], RingAllReduce())
        check_count("micro_batches", micro_batches, 1)
        limits = _limits(memory_limit, len(self.stage_devices))
        self._settings = PipelineSettings(self.stage_devices, micro_batches, schedule_of(schedule), recompute, limits)
        self._cut, self._carries = checked_cut(cut), carry_residuals
        self._stage_threads = StageThreads(self.stage_devices)
        self._optimizers = StageOptimizers(self.stage_devices, self._stage_threads)
        self._models: weakref.WeakKeyDictionary[Model, PipelinedModel] = weakref.WeakKeyDictionary()
        self._trained: Callable[[], PipelinedModel | None] = lambda: None  # the model that was trained last

    def create_variable(self, name: str, initial: np.ndarray, *, trainable: bool = True) -> DistributedVariable:
        return StageVariable(self, name, initial, trainable=trainable)

    def check_batch(self, samples: int) -> None:
        check_samples(samples, self._settings.micro_batches)

    def stages_of(self, model: Any, x: Any, optimizer: optim.Optimizer | None = None) -> PipelinedModel | None:
        if current_replica() is None:
            return None  # outside of `run`, as when `fit` builds a model, there are no threads of stages
        known = self._models.get(model)
        if known is None or not known.graph.is_of(model):
            known = self._models[model] = self._pipelined(model, x)
        if optimizer is not None:
            known.slots, self._trained = slots_of(optimizer), weakref.ref(known)
        return known

    def timings(self) -> PipelineTimings:
        """Returns where the time of the training steps has gone, for the model that was trained last.

        Raises:
            BadRequest: no model has been trained, or the model does not exist any more.
        """
        if (found := self._known_timings()) is None:
            raise errors.BadRequest(
                "no model of this strategy has taken a training step, or it does not exist any more; call fit first, "
                "and keep the model"
            )
        return found

    def register_metrics(self, registry: CollectorRegistry = REGISTRY) -> None:
        """Adds the metrics of the stages, `shoal_pipeline_*`, to a registry that the script serves.

        Args:
            registry: the registry. The default is that of `prometheus_client.start_http_server`.
        """
        registry.register(StageMetrics(lambda: self._known_timings() or PipelineTimings(0, 0.0, ())))

    def iterations(self, optimizer: optim.Optimizer) -> int:
        return self._optimizers.states.of(optimizer).version

    def set_learning_rate(self, optimizer: optim.Optimizer, learning_rate: float | optim.Schedule) -> None:
        self._optimizers.states.set_learning_rate(optimizer, learning_rate)

    def optimizer_state(self, optimizer: optim.Optimizer) -> dict[str, np.ndarray]:
        return self._optimizers.arrays(optimizer)

    def restore_optimizer(self, optimizer: optim.Optimizer, iterations: int, state: dict[str, np.ndarray]) -> None:
        self._optimizers.restore(optimizer, iterations, state)

    def close(self, error: str = "") -> None:
        super().close(error)
        self._stage_threads.close()

    def _apply(
        self,
        replica: ReplicaContext,
        optimizer: optim.Optimizer,
        variables: list[DistributedVariable],
        arrays: list[Array],
    ) -> None:
        del replica
        pairs = [(cast(StageVariable, it), [array]) for it, array in zip(variables, arrays, strict=True)]
        self._optimizers.update(self, optimizer, pairs)

    def _pipelined(self, model: Model, x: Any) -> PipelinedModel:
        """Returns a model in stages, with its variables on their devices."""
        given = [as_tensor(it) for it in (x if isinstance(x, list | tuple) else [x])]
        if not model.built and isinstance(model, Sequential):
            model.build(given[0].shape[1:])
        for variable in model.weights:
            check_scope(self, variable)
        graph = Graph(model)
        cuts = self._cuts(model, graph, given, slots_of(model.optimizer.spec) if model.optimizer else 0)
        made = PipelinedModel(self, model, graph, cuts, self._settings, self._stage_threads, self._optimizers)
        made.place_variables()
        return made

    def _cuts(self, model: Model, graph: Graph, given: list[Tensor], slots: int) -> list[int]:
        settings, stages = self._settings, len(self.stage_devices)
        places = Places(
            model.name,
            [call.layer.name for call in graph.calls],
            [list(map(graph.name_of, graph.crossing(place))) for place in range(len(graph.calls))],
            self._carries,
        )
        if self._cut is not None:
            return cut_as_given(places, self._cut, stages)
        places.check_stages(stages)
        if stages == 1:
            return []
        given = model.checked_inputs(given)
        samples = split_of(len(given[0]), min(len(given[0]), settings.micro_batches))[0]
        trained = set(map(id, model.trainable_variables))
        costs = measured_costs(
            graph,
            [Tensor(it.array[samples]) for it in given],
            lambda variable: 2 + slots if id(variable) in trained else 1,
            self._settled_clock,
        )
        held = [settings.schedule.held(stage, stages, settings.micro_batches) for stage in range(stages)]
        return cut_by_cost(places, costs, held, settings.limits, recompute=settings.recompute)

    def _known_timings(self) -> PipelineTimings | None:
        """Returns the timings of the model that was trained last; None if there is none, or if it was freed."""
        trained = self._trained()
        return trained.timings() if trained and trained.steps else None

    def _settled_clock(self) -> float:
        settle(self.devices[0])
        return time.perf_counter()


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


def _limits(given: Any, stages: int) -> list[float]:
    """Returns the bytes that each stage may hold."""
    if given is None:
        return [float("inf")] * stages
    each = list(given) if isinstance(given, Iterable) and not isinstance(given, str) else [given] * stages
    limits = [float(it) if isinstance(it, Real) and not isinstance(it, bool) else math.nan for it in each]
    if len(limits) != stages or not all(it > 0 for it in limits):
        raise errors.BadRequest(
            f"memory_limit is {given!r:.200}; give a number of bytes above 0, or one for each of {stages} devices"
        )
    return limits


__all__ = ["PipelineStrategy"]
