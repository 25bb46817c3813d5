"""Penalties of regularizers in a step of training: each replica adds its part of them to its part of the loss."""

import functools
import operator
from collections.abc import Iterator, Sequence

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.keras.tape import GradientTape
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.keras.training.trained import Trained
from shoal_distribute.strategies import Strategy
from shoal_distribute.values import DistributedVariable
from shoal_worker.arrays import namespace_of


def added_up(penalties: Sequence[Tensor]) -> Tensor | None:
    """Returns the sum of penalties; None if there are none, so that a step without regularizers costs nothing."""
    return functools.reduce(operator.add, penalties) if penalties else None


def share_of(penalty: Tensor, strategy: Strategy) -> Tensor:
    """Returns the part of a replica: the sum over all replicas whose gradients are added is the penalty.

    Args:
        penalty: the penalty that this replica has computed.
        strategy: the strategy of the model.
    """
    return penalty / strategy.num_replicas_in_sync


def check_takes_part(model: Trained) -> None:
    """Checks that a replica without samples may leave out the layers of a model in a step.

    Args:
        model: the model.

    Raises:
        InvalidData: a layer joins sums of all replicas.
    """
    for layer in model.all_layers(trained=True):
        if layer.joins_replicas:
            raise errors.InvalidData(
                f"a replica has no samples in this batch, but layer {layer.name} joins sums of all replicas "
                "(synchronized=True); give batches with a sample for each replica, or leave out a smaller last batch "
                "(drop_remainder=True)"
            )


def gradients_without_samples(model: Trained) -> Iterator[tuple[Array, DistributedVariable]]:
    """Yields the gradients of a replica without samples: its part of those of the weights' penalties, or 0.

    The order is that of `Optimizer.minimize`, which the other replicas call.

    Args:
        model: the model.
    """
    with GradientTape() as tape:
        penalty = added_up(model.losses)  # those of activities are of an earlier step, which no tape follows back
        loss = Tensor(np.zeros(())) if penalty is None else share_of(penalty, model.strategy)
    for gradient, variable in tape.gradients_in_turn(loss, model.trainable_variables):
        value = variable.read()
        yield namespace_of(value).zeros_like(value) if gradient is None else gradient, variable


__all__ = ["added_up", "check_takes_part", "gradients_without_samples", "share_of"]
