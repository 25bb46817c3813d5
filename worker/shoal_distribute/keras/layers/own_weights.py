"""Variables that layers of users make: `Layer.add_weight`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shoal import errors
from shoal.initializers import fill
from shoal_distribute.keras import config, constraints, initializers, regularizers
from shoal_distribute.keras.names import Advising
from shoal_distribute.keras.tensor import Tensor, recorded

if TYPE_CHECKING:
    from shoal_distribute.strategies import Strategy
    from shoal_distribute.values import DistributedVariable


class OwnWeights(Advising):
    """Base class of `Layer`: the variables that `add_weight` makes."""

    name: str
    dtype: str
    strategy: "Strategy"

    def __init__(self) -> None:
        self._own_weights: list[DistributedVariable] = []
        self._penalties: dict[int, Any] = {}  # regularizers by the place of their variables

    @property
    def own_variables(self) -> "list[DistributedVariable]":
        """The variables of the layer itself, without those of the layers in it."""
        return list(self._own_weights)

    def add_weight(
        self,
        shape: Sequence[int] | int | None = None,
        initializer: Any = None,
        dtype: str | None = None,
        trainable: bool = True,
        autocast: bool = True,
        regularizer: Any = None,
        constraint: Any = None,
        aggregation: str = "none",
        overwrite_with_gradient: bool = False,
        name: str | None = None,
    ) -> "DistributedVariable":
        """Returns a new variable of the layer. The constructor of a layer or its `build` calls it.

        Args:
            shape: its shape; None means a single number.
            initializer: name or object. None means "glorot_uniform", or "zeros" for integers.
            dtype: its dtype; None means that of the layer.
            trainable: whether it gets gradients.
            autocast: accepted for Keras' sake, and ignored.
            regularizer: name, object or function; None means none.
            constraint: as `regularizer`.
            aggregation: accepted for Keras' sake, and ignored: the replicas' values of a variable without gradients
                are averaged when they are read outside of `run`.
            overwrite_with_gradient: must be False.
            name: its name within the layer; None means "variable".

        Raises:
            InvalidLayer: `overwrite_with_gradient` is True.
            WrongContext: the strategy cannot apply the constraint.
        """
        del autocast, aggregation
        if overwrite_with_gradient:
            raise errors.InvalidLayer(
                f"layer {self.name}: add_weight(overwrite_with_gradient=True) is not supported; leave it out",
                kind=type(self).__name__,
            )
        lengths = () if shape is None else (shape,) if isinstance(shape, int) else tuple(shape)
        values = np.empty(lengths, dtype or self.dtype)
        default = "glorot_uniform" if values.dtype.kind == "f" else "zeros"
        stem = name or "variable"
        fill(values.reshape(-1), initializers.get(initializer or default), stem, lengths, config.next_seed())
        checked = self._applied_constraint(constraints.get(constraint), stem)
        taken = {it.name for it in self._own_weights}
        names = (f"{self.name}/{stem}{f'_{number}' if number else ''}" for number in range(len(taken) + 1))
        full = next(it for it in names if it not in taken)
        made = self.strategy.create_variable(full, values, trainable=trainable)
        made.constraint = checked
        if regularizer is not None:
            self._penalties[len(self._own_weights)] = regularizers.get(regularizer)
        self._own_weights.append(made)
        return made

    def _applied_constraint(self, constraint: Any, name: str) -> Any:
        """Returns the constraint of a variable.

        Args:
            constraint: the constraint; None for none.
            name: name of the variable, for the message.

        Raises:
            WrongContext: the strategy cannot apply it.
        """
        if constraint is not None and not self.strategy.applies_constraints:
            raise errors.WrongContext(
                f"layer {self.name} has a constraint for its {name}, but the servers of a "
                f"{type(self.strategy).__name__} update the variables, and apply no constraints; leave it out, or use "
                "a strategy without servers, such as MultiWorkerMirroredStrategy"
            )
        return constraint

    def _weight_losses(self, trained: set[int]) -> list[Tensor]:
        """Returns the penalties of this layer's own variables, if their ids are among those that get gradients."""
        found = []
        for number, penalty in self._penalties.items():
            variable = self._own_weights[number]
            if penalty is not None and id(variable) in trained:
                found.append(penalty(recorded(variable.read(), (variable,), lambda dy: [dy])))
        return found


__all__ = ["OwnWeights"]
