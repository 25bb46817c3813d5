"""Gradients that a training loop gives to a strategy, and their checks."""

from collections.abc import Iterable, Iterator

from shoal import errors
from shoal.program import Array
from shoal_distribute.replica_context import ReplicaContext, Replicated
from shoal_distribute.values import DistributedVariable, check_scope

# Gradients, each with its variable.
GradientsAndVariables = Iterable[tuple[Array | None, DistributedVariable]]


def checked_gradients(
    strategy: Replicated, replica: ReplicaContext, pairs: GradientsAndVariables
) -> Iterator[tuple[DistributedVariable, Array]]:
    """Yields each variable with its gradient, on the replica's device and in the variable's dtype.

    Args:
        strategy: the strategy that applies the gradients.
        replica: the calling replica.
        pairs: gradients, each with its variable. A gradient of None is left out.

    Raises:
        InvalidGradient: a variable is not trainable or given twice, or a gradient has another shape; or there is none.
        WrongContext: a variable belongs to another strategy.
    """
    names: set[str] = set()
    for gradient, variable in pairs:
        if gradient is None:
            continue
        if variable.name in names:
            raise errors.InvalidGradient(
                f"variable {variable.name} is given twice; give each variable once, with its own name"
            )
        names.add(variable.name)
        check_scope(strategy, variable)
        if not variable.trainable:
            raise errors.InvalidGradient(f"variable {variable.name} is not trainable, so it takes no gradient")
        if tuple(gradient.shape) != tuple(variable.shape):
            raise errors.InvalidGradient(
                f"the gradient of {variable.name} has the shape {gradient.shape}, but the variable {variable.shape}"
            )
        yield variable, variable.gradient(gradient, replica.device)
    if not names:
        raise errors.InvalidGradient(
            "no variable has a gradient; compute them from a loss that depends on the variables. In a model, a layer "
            "with trainable=False has no trainable variables"
        )


__all__ = ["GradientsAndVariables", "checked_gradients"]
