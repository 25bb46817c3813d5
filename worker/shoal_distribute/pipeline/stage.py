"""A stage of a pipeline: some layers of a model on one device, and their forward and backward passes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal import errors
from shoal.program import Array
from shoal_distribute.keras.layers.forward_pass import ForwardPass
from shoal_distribute.keras.tape import GradientTape
from shoal_distribute.keras.tensor import Tensor, is_recorded, leaf
from shoal_distribute.pipeline.cut import memory_error
from shoal_distribute.pipeline.graph import Graph
from shoal_distribute.pipeline.links import Passed
from shoal_distribute.pipeline.parts import StagePart
from shoal_distribute.pipeline.saved import saved_bytes
from shoal_distribute.pipeline.timings import layers_shown
from shoal_distribute.pipeline.variables import StageVariable

# Takes the outputs of a micro-batch, and whether it is computed again. It returns the sum of the losses.
MicroBatchLoss = Callable[[Any, bool], Tensor]
Outputs = list[Tensor]


@dataclass(frozen=True)
class StepPlan:
    """What a stage needs to know of a training step.

    Attributes:
        trained: ids of the variables that get gradients.
        slots: number of optimizer slots of each variable.
        held: the most micro-batches that the schedule holds at this stage.
        recompute: whether only the stage's inputs are kept for the backward pass.
        limit: bytes that the device may hold.
        numbers: for each micro-batch, see `ForwardPass`.
    """

    trained: frozenset[int]
    slots: int
    held: int
    recompute: bool
    limit: float
    numbers: Sequence[Mapping[int, Sequence[int]]]


@dataclass
class _Kept:
    """What is kept of a micro-batch between its two passes."""

    inputs: dict[int, Tensor]
    computed: ForwardPass
    objective: MicroBatchLoss | None
    nbytes: int
    tape: GradientTape | None = None  # None: the forward pass is to be computed again
    targets: Outputs = field(default_factory=list)


class ModelStage:
    """Computes the micro-batches of one stage, and adds up their gradients.

    Args:
        part: what it computes.
        graph: the model.

    Attributes:
        part: what it computes.
        gradients: the sums of the gradients of this step, each with its variable, by the id of the variable.
        peak_bytes: see `StageTimings`.
        peak_held: see `StageTimings`.
    """

    def __init__(self, part: StagePart, graph: Graph) -> None:
        self.part, self._graph = part, graph
        self.gradients: dict[int, tuple[StageVariable, Array]] = {}
        self.peak_bytes = self.peak_held = 0
        self._kept: dict[int, _Kept] = {}
        self._shapes: list[Any] = []  # of what the first micro-batch of the step received
        # By the variables that get gradients, and the shapes of a micro-batch: bytes that its pullbacks hold.
        self._saved: dict[Any, int] = {}

    def begin(self, plan: StepPlan) -> None:
        """Begins a training step."""
        self._plan = plan
        self.gradients, self._kept, self._shapes = {}, {}, []

    @property
    def fixed_bytes(self) -> int:
        """The bytes of its variables, their gradients and their optimizer slots, as of the last training step."""
        own = [it for it in self.part.variables if self.part.number in it.updaters]
        trained = [it for it in self.part.variables if id(it) in self._plan.trained]
        slots = sum(it.nbytes * self._plan.slots for it in own if id(it) in self._plan.trained)
        return sum(it.nbytes for it in own) + sum(it.nbytes for it in trained) + slots

    def forward(
        self, number: int, received: Sequence[Passed], fed: Mapping[int, Array], objective: MicroBatchLoss | None
    ) -> list[Passed]:
        """Computes the forward pass of a micro-batch, and keeps what its backward pass needs.

        Args:
            number: the number of the micro-batch.
            received: values of the stage before.
            fed: inputs of the model, by number.
            objective: the loss of the micro-batch, for the last stage.

        Returns:
            The values for the next stage. The last stage has none.

        Raises:
            InvalidShape: the micro-batch has other shapes than the first one of the step.
            LimitExceeded: the stage needs more memory than its device may hold.
        """
        self._check_shapes(number, received)
        arrays = dict(zip(self.part.receives, received, strict=True))
        inputs = {it: Tensor(each.array, leaf() if each.needs_gradient else None) for it, each in arrays.items()}
        inputs |= {it: Tensor(array) for it, array in fed.items()}
        computed = ForwardPass(self._plan.numbers[number])
        kept = self._kept[number] = _Kept(inputs, computed, objective, 0)
        with computed.first():
            self._compute(kept, again=False)
        passed = [] if objective else [Passed(it.array, is_recorded(it)) for it in kept.targets]
        self._account(kept)
        if self._plan.recompute:
            kept.tape, kept.targets = None, []
        return passed

    def backward(self, number: int, gradients: Sequence[Array | None]) -> list[Array | None]:
        """Computes the backward pass of a micro-batch, and adds up the gradients of the variables.

        Args:
            number: the number of the micro-batch.
            gradients: with respect to the values that `forward` returned. The last stage gets none.

        Returns:
            The gradients with respect to the values that the stage had received.
        """
        kept = self._kept.pop(number)
        if kept.tape is None:
            with kept.computed.again():
                self._compute(kept, again=True)
        assert kept.tape is not None
        weights = [None] if kept.objective else gradients
        pairs = [
            (target, weight)
            for target, weight in zip(kept.targets, weights, strict=True)
            if is_recorded(target) and (kept.objective or weight is not None)
        ]
        received = [kept.inputs[it] for it in self.part.receives]
        if not pairs:
            return [None for _ in received]
        watched = [it for it in received if it.node is not None]
        variables = [it for it in self.part.variables if id(it) in self._plan.trained]
        found = kept.tape.gradient([it for it, _ in pairs], [*variables, *watched], [it for _, it in pairs])
        for variable, gradient in zip(variables, found[: len(variables)], strict=True):
            if gradient is not None:
                self._add(variable, variable.gradient(gradient.stored, self.part.device))
        by_input = iter(found[len(variables) :])
        asked = [next(by_input) if it.node is not None else None for it in received]
        return [None if it is None else it.array for it in asked]

    def outputs(self, received: Sequence[Passed], fed: Mapping[int, Array]) -> list[Passed]:
        """Computes a micro-batch in evaluation.

        Args:
            received: values of the stage before.
            fed: inputs of the model, by number.

        Returns:
            The values for the next stage, or the outputs of the model.
        """
        arrays = zip(self.part.receives, received, strict=True)
        values = {it: Tensor(each.array) for it, each in arrays} | {it: Tensor(array) for it, array in fed.items()}
        return [Passed(it.array, needs_gradient=False) for it in self._values(values, training=False)]

    def _compute(self, kept: _Kept, *, again: bool) -> None:
        """Computes the values that a stage sends, or the loss, under a tape of their own."""
        kept.tape = GradientTape()
        with kept.tape:
            found = self._values(dict(kept.inputs), training=True)
            if kept.objective:
                found = [kept.objective(found if self._graph.returns_list else found[0], again)]
        kept.targets = found

    def _values(self, values: dict[int, Tensor], *, training: bool) -> Outputs:
        for call in self.part.calls:
            given = [values[it] for it in call.inputs]
            learns = training if call.training is None else call.training
            values[call.output] = call.layer(given if call.takes_list else given[0], training=learns)
        return [values[it] for it in self.part.sends]

    def _add(self, variable: StageVariable, gradient: Array) -> None:
        before = self.gradients.get(id(variable))
        if before is None:
            self.gradients[id(variable)] = variable, gradient.astype(variable.dtype)  # a copy: others may have it
            return
        total = before[1]
        total += gradient  # in place

    def _check_shapes(self, number: int, received: Sequence[Passed]) -> None:
        shapes = [(it.array.shape[1:], it.array.dtype) for it in received]
        self._shapes = self._shapes or shapes
        for value, before, now in zip(self.part.receives, self._shapes, shapes, strict=True):
            if before != now:
                raise errors.InvalidShape(
                    f"stage {self.part.number} got samples of the shape {now[0]} and {now[1]} from layer "
                    f"{self._graph.name_of(value)} in micro-batch {number}, but {before[0]} and {before[1]} in the "
                    "first one; all micro-batches of a step need the same shapes, so let this layer return one shape "
                    "and dtype, for example by padding"
                )

    def _account(self, kept: _Kept) -> None:
        """Counts the bytes that are kept, and checks the limit."""
        assert kept.tape is not None
        key = self._plan.trained, *(it.array.shape for it in kept.inputs.values())
        given = [it.array for it in kept.inputs.values()]
        if key not in self._saved:
            own = [it.values[0] for it in self.part.variables]
            self._saved[key] = saved_bytes([*kept.tape.pullbacks, *given], own)
        whole, fixed = self._saved[key], self.fixed_bytes
        kept.nbytes = sum(int(it.nbytes) for it in given) if self._plan.recompute else whole
        working = whole - kept.nbytes  # of the one micro-batch that is computed again
        need = fixed + self._plan.held * kept.nbytes + working
        if need > self._plan.limit:
            what = f"{layers_shown(self.part.layers)}, on {self.part.device}"
            raise memory_error(self.part.number, what, need, self._plan.limit)
        held = sum(it.nbytes for it in self._kept.values())
        self.peak_bytes = max(self.peak_bytes, fixed + held + working)
        self.peak_held = max(self.peak_held, len(self._kept))


__all__ = ["MicroBatchLoss", "ModelStage", "StepPlan"]
