"""Measured costs of the layers of a model, by which it is cut into stages."""

from collections.abc import Callable, Sequence

from shoal_distribute.keras.layers.forward_pass import Trial
from shoal_distribute.keras.tape import GradientTape
from shoal_distribute.keras.tensor import Tensor, is_recorded, leaf
from shoal_distribute.pipeline.cut import CallCost
from shoal_distribute.pipeline.graph import Graph, LayerCall
from shoal_distribute.pipeline.saved import saved_bytes
from shoal_nn.layer import TrainingContext

_ROUNDS = 3  # the first one warms up caches and libraries


def measured_costs(
    graph: Graph, inputs: Sequence[Tensor], slots: int, clock: Callable[[], float]
) -> tuple[list[CallCost], list[int]]:
    """Computes each call of a model's layers some times, forward and backward, without a trace in its variables.

    Args:
        graph: the model.
        inputs: the inputs of a micro-batch.
        slots: number of optimizer slots of each variable.
        clock: returns seconds, after the device has computed what was started.

    Returns:
        The cost of each call, and the bytes that cross each place in front of a call.
    """
    values = dict(enumerate(inputs))
    counted: set[int] = set()
    costs: list[CallCost] = []
    for call in graph.calls:
        output, seconds, saved = min(
            (_timed(call, [values[it] for it in call.inputs], clock) for _ in range(_ROUNDS)), key=lambda it: it[1]
        )
        new = [it for it in call.layer.weights if id(it) not in counted]
        counted.update(map(id, new))
        copies = [(it, 2 + slots if it.trainable else 1) for it in new]  # the value, its gradient, and the slots
        fixed = sum(int(it.values[0].nbytes) * count for it, count in copies)
        costs.append(CallCost(seconds, fixed, saved, int(output.array.nbytes)))
        values[call.output] = output
    first = len(graph.inputs)
    sent = [
        sum(costs[value - first].output_bytes for value in graph.crossing(place)) for place in range(len(graph.calls))
    ]
    return costs, sent


def _timed(call: LayerCall, given: Sequence[Tensor], clock: Callable[[], float]) -> tuple[Tensor, float, int]:
    """Returns the output of a call, the seconds of both passes, and the bytes kept between them."""
    watched = [Tensor(it.array, leaf()) if is_recorded(it) else Tensor(it.array) for it in given]
    started = clock()
    with Trial(lambda: TrainingContext(0, "trial")).first(), GradientTape() as tape:
        output = call.layer(watched if call.takes_list else watched[0], training=call.training is not False)
    forward = clock() - started
    saved = saved_bytes(tape.pullbacks, [it.values[0] for it in call.layer.weights])
    needs_gradient = is_recorded(output)
    started = clock()
    if needs_gradient:
        tape.gradient(output, [*call.layer.trainable_variables, *(it for it in watched if it.node)])
    return Tensor(output.array, leaf() if needs_gradient else None), forward + clock() - started, saved


__all__ = ["measured_costs"]
