"""Base class of the optimizers: an optimizer of `shoal.optim`, and the strategy that keeps its state."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, Protocol

import numpy as np

from shoal import errors, optim
from shoal.program import Array
from shoal_distribute.keras.names import Advising
from shoal_distribute.keras.optimizers.schedules import FunctionSchedule, rate_of
from shoal_distribute.keras.tensor import Tensor, array_of
from shoal_distribute.local_optimizers import GradientClipping
from shoal_distribute.strategies import Strategy, get_strategy
from shoal_distribute.values import DistributedVariable, check_scope

_NO_AVERAGES = "no averages of the variables are kept"


class Tape(Protocol):
    """What an optimizer asks a tape, which is a `GradientTape`."""

    def gradients_in_turn(
        self, target: Any, variables: Sequence[DistributedVariable]
    ) -> Iterator[tuple[Array | None, DistributedVariable]]:
        """See `GradientTape`.

        Args:
            target: the loss.
            variables: the variables.
        """


class Optimizer(Advising):
    """Rule by which gradients change the variables of a model.

    The gradients of all replicas are added, and the sum is applied. The strategy in whose scope the optimizer was made
    keeps its state.

    Args:
        spec: the optimizer of `shoal.optim` that computes it.
        name: its name.
        clipping: limits of each gradient; None means none.

    Raises:
        WrongContext: the servers of the strategy cannot apply the limits, or a schedule that is a function.

    Attributes:
        spec: the optimizer of `shoal.optim` that computes it.
        name: its name.
        strategy: the strategy that keeps its state.
    """

    refused: ClassVar = {
        "use_ema": (False, _NO_AVERAGES),
        "ema_momentum": (0.99, _NO_AVERAGES),
        "ema_overwrite_frequency": (None, _NO_AVERAGES),
        "loss_scale_factor": (None, "gradients are not scaled"),
        "gradient_accumulation_steps": (None, "each call applies its gradients; give larger batches"),
    }
    strategy: Strategy

    def __init__(
        self, spec: optim.Optimizer, name: str | None = None, clipping: GradientClipping | None = None
    ) -> None:
        self.spec, self.name = spec, name or spec.name
        if clipping is not None:
            clipping.set_for(spec)
        self._rate: float | optim.Schedule = spec.learning_rate
        self.use(get_strategy())

    @property
    def iterations(self) -> int:
        """The number of updates so far."""
        return self.strategy.iterations(self.spec)

    @property
    def learning_rate(self) -> Tensor:
        """The rate of the next update, a `Tensor` of one number. It can be set to a number or a schedule."""
        rate = self._rate.rate(self.iterations) if isinstance(self._rate, optim.Schedule) else self._rate
        return Tensor(np.asarray(rate))

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        given = rate_of(rate)
        self._check_applied(self.strategy, given)
        self._rate = given
        self.strategy.set_learning_rate(self.spec, self._rate)

    def use(self, strategy: Strategy) -> None:
        """Makes a strategy keep the state of a new optimizer.

        Args:
            strategy: the strategy.

        Raises:
            WrongContext: see the class.
        """
        self._check_applied(strategy, self._rate)
        self.strategy = strategy
        strategy.adopt_optimizer(self.spec)

    def build(self, variables: Iterable[DistributedVariable]) -> None:
        """Checks that the optimizer can update variables. Their slots are made with the first update.

        Args:
            variables: the variables.

        Raises:
            WrongContext: a variable was made in the scope of another strategy.
        """
        for variable in variables:
            check_scope(self.strategy, variable)

    def apply_gradients(self, grads_and_vars: Iterable[tuple[Any, DistributedVariable]]) -> None:
        """Adds up the gradients of all replicas, and applies them once. All replicas call it, within `Strategy.run`.

        Args:
            grads_and_vars: pairs of a gradient and its variable, such as `zip(gradients, model.trainable_variables)`.
                A pair whose gradient is None is left out.

        Raises:
            WrongContext: the optimizer was made in the scope of another strategy, or the call is outside of its `run`.
        """
        pairs = [
            (gradient.stored if isinstance(gradient, Tensor) else array_of(gradient), variable)
            for gradient, variable in grads_and_vars
        ]
        self._current_strategy().apply_gradients(self.spec, pairs)

    def minimize(self, loss: Any, var_list: Sequence[DistributedVariable], tape: Tape) -> None:
        """Computes the gradients of a loss, and does the same as `apply_gradients` with them.

        Strategies of several processes add up the first gradients while the backward pass computes the next ones. After
        `tape.gradient`, they cannot.

        Args:
            loss: a `Tensor` computed within the tape.
            var_list: the variables, such as `model.trainable_variables`.
            tape: the `GradientTape`.

        Raises:
            BadRequest: the loss was not computed within the tape, or the tape was used before.
            WrongContext: as for `apply_gradients`.
        """
        self._current_strategy().apply_gradients(self.spec, tape.gradients_in_turn(loss, var_list))

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[DistributedVariable]) -> None:
        """Does the same as `apply_gradients`, with the gradients and variables apart.

        Args:
            grads: the gradients.
            trainable_variables: their variables.
        """
        self.apply_gradients(zip(grads, trainable_variables, strict=True))

    def state(self) -> dict[str, np.ndarray]:
        """Returns the number of updates as "iterations", and the slots, on the host."""
        return {"iterations": np.array(self.iterations), **self.strategy.optimizer_state(self.spec)}

    def restore(self, state: dict[str, np.ndarray]) -> None:
        """Sets the number of updates and the slots.

        Args:
            state: as `state` returned it.
        """
        slots = {name: array for name, array in state.items() if name != "iterations"}
        self.strategy.restore_optimizer(self.spec, int(state["iterations"]), slots)

    def _check_applied(self, strategy: Strategy, rate: float | optim.Schedule) -> None:
        """Raises WrongContext if servers update the variables, and this optimizer has what they cannot compute."""
        if strategy.applies_constraints:
            return
        found = "clipnorm and clipvalue" if GradientClipping.of(self.spec) else ""
        if found or isinstance(rate, FunctionSchedule):
            instead = "use global_clipnorm" if found else "use a schedule of shoal.optim"
            raise errors.WrongContext(
                f"optimizer {self.name} has {found or 'a schedule that is a function'}, but the servers of a "
                f"{type(strategy).__name__} update the variables, and cannot apply this; {instead}, or a strategy "
                "without servers, such as MultiWorkerMirroredStrategy"
            )

    def _current_strategy(self) -> Strategy:
        strategy = get_strategy()
        if strategy.is_default and not self.strategy.is_default:
            raise errors.WrongContext(
                f"optimizer {self.name} of a {type(self.strategy).__name__} is applied outside of run; call it in the "
                "function that strategy.run runs"
            )
        if strategy is not self.strategy:
            raise errors.WrongContext(
                f"optimizer {self.name} was made outside of the scope of the {type(strategy).__name__} that uses it; "
                "make it within `with strategy.scope():`"
            )
        return strategy


__all__ = ["Optimizer"]
