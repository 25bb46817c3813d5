"""Measured costs of the layers of a model, by which it is cut into stages."""

from collections.abc import Callable, Iterable, Sequence
from typing import cast

from shoal.program import Array
from shoal_distribute.keras.layers.forward_pass import Trial
from shoal_distribute.keras.tape import GradientTape
from shoal_distribute.keras.tensor import Tensor, is_recorded, leaf
from shoal_distribute.pipeline.cut import CallCost, ModelCosts
from shoal_distribute.pipeline.graph import Graph, LayerCall
from shoal_distribute.pipeline.saved import memory_id, saved_arrays
from shoal_distribute.pipeline.variables import StageVariable
from shoal_distribute.values import DistributedVariable
from shoal_nn.layer import TrainingContext

_ROUNDS = 3  # the first one warms up caches and libraries


def measured_costs(
    graph: Graph,
    inputs: Sequence[Tensor],
    copies: Callable[[DistributedVariable], int],
    clock: Callable[[], float],
) -> ModelCosts:
    """Computes each call of a model's layers some times, forward and backward, without a trace in its variables.

    Args:
        graph: the model.
        inputs: the inputs of a micro-batch.
        copies: returns how many arrays of a variable's size a stage needs: its value, and if it is trained, its
            gradient and the optimizer's slots.
        clock: returns seconds, after the device has computed what was started.

    Returns:
        The costs. The numbers of arrays are valid within them.
    """
    values = dict(enumerate(inputs))  # they exist until the end, so the numbers of their arrays stay valid
    counted: set[int] = set()
    costs: list[CallCost] = []
    for number, call in enumerate(graph.calls, 1):
        given = [values[it] for it in call.inputs]
        output, forward, backward, saved = min(
            (_timed(call, given, clock) for _ in range(_ROUNDS)), key=lambda it: it[1] + it[2]
        )
        values[call.output] = output
        new = [it for it in call.layer.weights if id(it) not in counted]
        counted.update(map(id, new))
        fixed = sum(cast(StageVariable, it).nbytes * copies(it) for it in new)
        passed = {memory_id(it.array) for it in values.values()}
        own = sum(size for key, size in saved.items() if key not in passed)
        shared = {key: size for key, size in saved.items() if key in passed}
        fed = _sizes(values[it].array for it in call.inputs if it < len(inputs))
        costs.append(CallCost(forward + backward, forward, fixed, {**shared, -number: own}, fed))
    crossing = [_sizes(values[value].array for value in graph.crossing(place)) for place in range(len(graph.calls))]
    return ModelCosts(costs, crossing)


def _timed(
    call: LayerCall, given: Sequence[Tensor], clock: Callable[[], float]
) -> tuple[Tensor, float, float, dict[int, int]]:
    """Returns the output of a call, the seconds of both passes, and the bytes of the arrays kept between them."""
    watched = [Tensor(it.stored, leaf()) if is_recorded(it) else Tensor(it.stored) for it in given]
    started = clock()
    with Trial(lambda: TrainingContext(0, "trial")).first(), GradientTape() as tape:
        output = call.layer(watched if call.takes_list else watched[0], training=call.training is not False)
    forward = clock() - started
    saved = saved_arrays(tape.pullbacks, [it.values[0] for it in call.layer.weights])
    needs_gradient = is_recorded(output)
    started = clock()
    if needs_gradient:
        tape.gradient(output, [*call.layer.trainable_variables, *(it for it in watched if it.node)])
    return Tensor(output.stored, leaf() if needs_gradient else None), forward, clock() - started, saved


def _sizes(arrays: Iterable[Array]) -> dict[int, int]:
    """Returns the bytes of arrays, by `memory_id`."""
    return {memory_id(it): int(it.nbytes) for it in arrays}


__all__ = ["measured_costs"]
