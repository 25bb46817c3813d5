"""StagedStrategy: base class of the strategies that compute models in stages."""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import numpy as np

from shoal import errors, optim
from shoal._system import check_count
from shoal_distribute.cross_device_ops import RingAllReduce
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.keras.layers.base import as_tensor
from shoal_distribute.keras.models.model import Model
from shoal_distribute.keras.models.sequential import Sequential
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.local_optimizers import slots_of
from shoal_distribute.pipeline.costs import measured_costs
from shoal_distribute.pipeline.cut import Places, checked_cut, cut_as_given, cut_by_cost
from shoal_distribute.pipeline.graph import Graph
from shoal_distribute.pipeline.links import settle
from shoal_distribute.pipeline.model_stages import PipelinedModel, PipelineSettings
from shoal_distribute.pipeline.runner import StageRunner
from shoal_distribute.pipeline.schedules import schedule_of, split_of
from shoal_distribute.pipeline.stage_optimizers import StageOptimizers, StageUpdates
from shoal_distribute.pipeline.timings import PipelineTimings
from shoal_distribute.replica_context import current_replica
from shoal_distribute.strategies import Strategy
from shoal_distribute.values import check_scope


class StagedStrategy(Strategy):
    """A strategy that cuts models into stages.

    Args:
        runner: runs the stages of this process.
        settings: how the pipelines run.
        cut: see `PipelineStrategy`.
        carry_residuals: see `PipelineStrategy`.
    """

    keeps_split_variables = True

    def __init__(
        self, runner: StageRunner, settings: PipelineSettings, cut: Sequence[str | int] | None, carry_residuals: bool
    ) -> None:
        super().__init__([settings.devices[runner.own[0]]], RingAllReduce())
        self._runner, self._settings = runner, settings
        self._cut, self._carries = checked_cut(cut), carry_residuals
        self._optimizers = StageOptimizers(settings.devices, runner)
        self._updates: StageUpdates = self._optimizers
        self._models: weakref.WeakKeyDictionary[Model, PipelinedModel] = weakref.WeakKeyDictionary()
        self._trained: Callable[[], PipelinedModel | None] = lambda: None  # the model that was trained last

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

        In several processes, those of all stages call it.

        Raises:
            BadRequest: no model has been trained, or the model does not exist any more.
        """
        if (found := self._known_timings()) is None:
            raise errors.BadRequest(
                "no model of this strategy has taken a training step, or it does not exist any more; call fit first, "
                "and keep the model"
            )
        return found

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
        self._runner.close()

    def _pipelined(self, model: Model, x: Any) -> PipelinedModel:
        """Returns a model in stages, with its variables on their devices."""
        given = [as_tensor(it) for it in model.listed_inputs(x)]
        if not model.built and isinstance(model, Sequential):
            model.build(given[0].shape[1:])
        for variable in model.weights:
            check_scope(self, variable)
        graph = Graph(model)
        cuts = self._cuts(model, graph, given, slots_of(model.optimizer.spec) if model.optimizer else 0)
        made = PipelinedModel(self, model, graph, cuts, self._settings, self._runner, self._updates)
        made.place_variables()
        return made

    def _cuts(self, model: Model, graph: Graph, given: list[Tensor], slots: int) -> list[int]:
        settings, stages = self._settings, len(self._settings.devices)
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
        inputs = [Tensor(it.array[samples]) for it in given]
        trained = set(map(id, model.trainable_variables))
        held = [settings.schedule.held(stage, stages, settings.micro_batches) for stage in range(stages)]

        def measured() -> list[int]:
            costs = measured_costs(
                graph, inputs, lambda variable: 2 + slots if id(variable) in trained else 1, self._settled_clock
            )
            return cut_by_cost(places, costs, held, settings.limits, recompute=settings.recompute)

        return self._runner.chosen(measured, stages - 1)

    def _known_timings(self) -> PipelineTimings | None:
        """Returns the timings of the model that was trained last; None if there is none, or if it was freed."""
        trained = self._trained()
        return trained.timings() if trained and trained.steps else None

    def _settled_clock(self) -> float:
        settle(self.devices[0])
        return time.perf_counter()


def settings_of(
    devices: Sequence[LogicalDevice],
    micro_batches: int,
    schedule: str,
    recompute: bool,
    memory_limit: int | Sequence[int] | None,
) -> PipelineSettings:
    """Returns how the pipelines of a strategy run.

    Args:
        devices: the device of each stage.
        micro_batches, schedule, recompute, memory_limit: see `PipelineStrategy`.

    Raises:
        BadRequest: an argument is invalid.
    """
    check_count("micro_batches", micro_batches, 1)
    limits = _limits(memory_limit, len(devices))
    return PipelineSettings(devices, micro_batches, schedule_of(schedule), recompute, limits)


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


__all__ = ["StagedStrategy", "settings_of"]
