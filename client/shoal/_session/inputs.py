"""Conversion of what users pass to a session: to arrays by variable name, numbers and reports."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np

from shoal import errors, optim
from shoal._numerics import array_of, is_real
from shoal._session import trees
from shoal._system import check_type
from shoal._training import GradientBuffers, Gradients, PushResult, Report
from shoal.checkpoint_policy import AUTO
from shoal.variables import Variable, variable_from_array

# Largest number of variables that an error names.
_MAX_NAMED = 10


def variables_of(tree: Any) -> tuple[dict[str, Variable | np.ndarray], trees.Structure]:
    """Returns the variables in a tree by name, each as a `Variable` or an array, and the tree's structure.

    Raises:
        BadRequest: the tree is not a container.
        InvalidVariable: a leaf is neither a `Variable` nor an array of a supported shape and dtype, or the tree has an
            invalid key or an empty list. The message names the variable.
    """
    if not trees.is_container(tree):
        check_type("variables", tree, (), "a dict of arrays by name, such as {'w': np.zeros(3)}")
    leaves, structure = trees.flatten(tree, "variables", errors.InvalidVariable, no_empty_lists=True)
    found = {name: _variable(name, value) for name, value in leaves.items()}
    return found, structure


def state_of(
    state: Any, options: Mapping[str, Any], variables: Mapping[str, Variable | np.ndarray] | None
) -> optim.OptimizerState:
    """Returns the state of an optimizer for a new job, checked, with arrays of NumPy by slot and variable.

    Args:
        state: what the user gave: its slots may be trees.
        options: options of the job.
        variables: what `variables_of` returned; None if the user gave no variables.

    Raises:
        BadRequest: it is not a state; or there are no variables, or no optimizer; or the job starts from a checkpoint.
        InvalidOptimizer: it does not fit the optimizer or the variables.
    """
    check_type("optimizer_state", state, optim.OptimizerState, "a shoal.optim.OptimizerState, or leave it out")
    optimizer, restore = options.get("optimizer"), options.get("restore")
    if variables is None or not isinstance(optimizer, optim.Optimizer):
        raise errors.BadRequest("optimizer_state is given without variables or without optimizer; give both of them")
    if restore not in (None, "", AUTO):
        raise errors.BadRequest(
            f"optimizer_state and restore={restore!r:.100} are both given, and the checkpoint has a state of its own; "
            "give only one of them"
        )
    flat = {slot: _flat_slot(slot, tree, variables) for slot, tree in state.slots.items()}
    known = {name: it if isinstance(it, Variable) else variable_from_array(it) for name, it in variables.items()}
    return optim.checked_state(optim.OptimizerState(flat, state.updates), optimizer, known)


def _flat_slot(slot: str, tree: Any, known: Collection[str]) -> dict[str, np.ndarray]:
    if not trees.is_container(tree):
        raise errors.InvalidOptimizer(
            f"the slot {slot!r} of the optimizer state is a {type(tree).__name__}; give a dict of arrays by the names "
            "of variables, or a tree as for the variables"
        )
    leaves, _ = trees.flatten(tree, slot, errors.InvalidOptimizer, known=known)
    return {name: array_of(value, f"{slot} of {name!r}", errors.InvalidOptimizer) for name, value in leaves.items()}


def _variable(name: str, value: Any) -> Variable | np.ndarray:
    if isinstance(value, Variable):
        return value
    array = to_array(name, value, errors.InvalidVariable)
    try:
        variable_from_array(array)
    except (errors.InvalidVariable, errors.LimitExceeded) as error:
        raise type(error)(f"variable {name!r}: {error.message}", **{**error.details, "variable": name}) from None
    return array


def to_array(name: str, value: Any, error: type[errors.ShoalError], wanted: np.dtype | None = None) -> np.ndarray:
    """Returns the value of a variable as an array of real numbers; see `array_of`."""
    return array_of(value, f"variable {name!r}", error, wanted, variable=name)


class Inputs:
    """Converts the arguments of a session's pushes.

    Args:
        variables: variables of the job, by name.
        structure: structure of the tree in which the user gave them; None if another session described the job.
        optimizer: optimizer of the job.
    """

    def __init__(
        self, variables: Mapping[str, Variable], structure: trees.Structure | None, optimizer: optim.Optimizer
    ) -> None:
        self._variables, self._structure, self._optimizer = variables, structure, optimizer

    def rebuilt(self, values: dict[str, np.ndarray]) -> Any:
        """Returns pulled values in the structure in which the user gave the variables."""
        return self._structure.rebuilt(values) if self._structure else values

    def is_tree(self, gradients: Any) -> bool:
        """Returns whether gradients are a tree. Otherwise they are pairs of name and array."""
        return isinstance(gradients, Mapping) or (
            self._structure is not None and type(gradients) is self._structure.kind
        )

    def pushed(self, gradients: Any, timed: Callable[[Iterator[Any]], Iterator[Any]]) -> Gradients:
        """Returns gradients by name, or an iterator over pairs of name and array.

        Args:
            gradients: what the user pushes.
            timed: see `generated`.

        Raises:
            InvalidGradient: see `gradients` and `pairs`.
        """
        return self.gradients(gradients) if self.is_tree(gradients) else self.generated(gradients, timed)

    def gradients(self, tree: Any) -> Mapping[str, np.ndarray]:
        """Returns the gradients in a tree, by name. Gradient buffers and arrays are not copied.

        Raises:
            InvalidGradient: a key or a leaf is invalid, or a gradient is None and the optimizer would change the
                variable even without one, or all gradients are None, except those of frozen variables.
        """
        return self._arrays(tree, "gradients", none_is_zero=True)

    def updates(self, tree: Any) -> Mapping[str, np.ndarray]:
        """Returns the updates in a tree, by name; those that are None are left out.

        Raises:
            BadRequest: the updates are not a container.
            InvalidGradient: a key or a leaf is invalid.
        """
        if not self.is_tree(tree):
            check_type("updates", tree, Mapping, "a dict of arrays by name, such as {'mean': mean}")
        return self._arrays(tree, "updates", none_is_zero=False)

    def pairs(self, gradients: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Returns an iterator over pairs of name and array.

        Raises:
            InvalidGradient: the gradients are not an iterable, or are a pair of a value and gradients.
        """
        if isinstance(gradients, tuple) and self._has_value(gradients):
            raise errors.InvalidGradient(
                "gradients are a pair of a value and gradients, such as jax.value_and_grad returns; push only the "
                "gradients: loss, gradients = ...; session.push(gradients)"
            )
        if not isinstance(gradients, Iterable):
            raise errors.InvalidGradient(
                f"gradients must be a mapping by name, or pairs of name and array, not a {type(gradients).__name__}"
            )
        return iter(gradients)

    def generated(
        self, gradients: Iterable[tuple[str, Any]], timed: Callable[[Iterator[Any]], Iterator[Any]]
    ) -> Iterator[tuple[str, np.ndarray]]:
        """Yields pairs of name and array, as `pairs` and `pair` give them, when they are asked for.

        Args:
            gradients: the user's iterable.
            timed: yields the items of an iterator of the user, and records the time that it takes.
        """
        yield from map(self.pair, timed(self.pairs(gradients)))

    def pair(self, pair: tuple[str, Any]) -> tuple[str, np.ndarray]:
        """Returns a pair of name and array.

        Raises:
            InvalidGradient: the value is not a pair, its name is not a string, or its gradient is invalid.
        """
        match pair:
            case (str(name), None):
                return name, self._without_gradient([name]).get(name, np.zeros(()))  # the push refuses unknown names
            case (str(name), value):
                return name, self._array(name, value)
            case (name, _):
                raise errors.InvalidGradient(
                    f"the name {name!r:.100} of a gradient is a {type(name).__name__}; give a string"
                )
        raise errors.InvalidGradient(
            f"gradients contain a {type(pair).__name__} without a name; give a dict of arrays by name, or pairs of "
            "name and array"
        )

    def _has_value(self, pair: tuple[Any, ...]) -> bool:
        """Returns whether a tuple is a value and gradients rather than pairs of name and array."""
        match pair:
            case ((str(), _), _):
                return False
            case (_, tree):
                return self.is_tree(tree) or isinstance(tree, list)
        return False

    def _arrays(self, tree: Any, what: str, *, none_is_zero: bool) -> Mapping[str, np.ndarray]:
        if isinstance(tree, GradientBuffers) or (
            isinstance(tree, dict)
            and set(map(type, tree.values())) <= {np.ndarray}
            and set(map(type, tree)) <= {str}
            and all(map(is_real, {array.dtype for array in tree.values()}))
        ):
            return cast(Mapping[str, np.ndarray], tree)
        leaves, _ = trees.flatten(tree, what, errors.InvalidGradient, none_is_leaf=True, known=self._variables)
        found = {name: self._array(name, value) for name, value in leaves.items() if value is not None}
        trainable = (name for name, value in leaves.items() if value is None and name in self._variables)
        missing = [name for name in trainable if self._variables[name].trainable]
        if none_is_zero and missing:
            given = any(name in self._variables and not self._is_frozen(name) for name in found)
            if not given and not all(map(self._is_frozen, missing)):
                raise errors.InvalidGradient(
                    "all gradients are None: compute them before the push (PyTorch: loss.backward()), or call skip()"
                )
            found |= self._without_gradient(missing)
        return found

    def _array(self, name: str, value: Any) -> np.ndarray:
        known = self._variables.get(name)
        return to_array(name, value, errors.InvalidGradient, known.dtype if known else None)

    def _without_gradient(self, names: list[str]) -> dict[str, np.ndarray]:
        """Returns gradients by which the servers leave variables unchanged.

        Raises:
            InvalidGradient: the optimizer also changes one of the variables if its gradient is zero.
        """
        known = {name: self._variables[name] for name in names if name in self._variables}
        changed = [name for name in known if self._changes_at_zero(name)]
        if changed:
            variable = known[changed[0]]
            shown = ", ".join(map(repr, changed[:_MAX_NAMED])) + (", ..." if len(changed) > _MAX_NAMED else "")
            raise errors.InvalidGradient(
                f"the gradient of {shown} is None, and {type(self._optimizer).__name__} with these settings also "
                f"changes a variable whose gradient is zero: push np.zeros({variable.shape}, {variable.dtype.name!r}) "
                "to let it, or declare a variable that never has a gradient with trainable=False",
                variable=changed[0],
            )
        return {name: np.zeros(variable.shape, variable.dtype) for name, variable in known.items()}

    def _is_frozen(self, name: str) -> bool:
        return self._optimizer.settings_of(name).rate == 0

    def _changes_at_zero(self, name: str) -> bool:
        """Returns whether the optimizer changes a variable whose gradient is zero."""
        is_plain = type(self._optimizer) is optim.SGD and self._optimizer.settings_of(name).weight_decay == 0
        return not (is_plain or self._is_frozen(name))


def numbers_of(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Returns metrics as floats, by name.

    Raises:
        BadRequest: the metrics are not a mapping of numbers.
    """
    metrics = {} if metrics is None else metrics
    check_type("metrics", metrics, Mapping, "a dict of numbers by name, such as {'loss': 0.3}")
    return {name: number(name, value) for name, value in metrics.items()}


def lines_of(text: str) -> list[str]:
    """Returns the lines of a text for the log.

    Raises:
        BadRequest: it is not a string.
    """
    check_type("text", text, str, "a string, such as f'accuracy {accuracy:.3f}'")
    return text.splitlines()


def number(name: str, value: float) -> float:
    """Returns a metric as a float.

    Raises:
        BadRequest: the value is not a number.
    """
    try:
        detach = getattr(value, "detach", None)  # PyTorch warns of the float of a loss that has a graph
        return float(detach() if detach else value)
    except (TypeError, ValueError, OverflowError):
        raise errors.BadRequest(f"metric {name!r} is {value!r}; give a number", metric=name) from None


def weight_of(value: float) -> float:
    """Returns the weight of a push as a float.

    Raises:
        BadRequest: the value is not a number.
    """
    try:
        if not isinstance(value, str | bytes):  # `float` reads numbers from texts
            return float(value)
    except (TypeError, ValueError, OverflowError):
        pass
    raise errors.BadRequest(f"weight is {value!r:.200}; give a number, such as the number of samples of the batch")


def rate_of(value: Any) -> float | None:
    """Returns the learning rate of a push as a float, or None.

    Raises:
        BadRequest: it is not a finite number of at least 0.
    """
    if value is None:
        return None
    try:
        if not isinstance(value, str | bytes) and 0 <= (rate := float(value)) < math.inf:
            return rate
    except (TypeError, ValueError, OverflowError):
        pass
    raise errors.BadRequest(f"learning_rate is {value!r:.200}; give a finite number of at least 0, or None")


def report_of(result: PushResult, samples: float, metrics: Mapping[str, float]) -> Report:
    """Returns the report of one push.

    Args:
        result: result of the push.
        samples: number of samples in the push.
        metrics: metrics of the step, by name.
    """
    if result.outcome != "accepted":
        return Report(step=result.step, dropped=1)
    return Report(
        step=result.step,
        accepted=1,
        samples=round(samples),
        values=metrics,
        staleness={result.staleness: 1},
    )


__all__ = [
    "Inputs",
    "lines_of",
    "number",
    "numbers_of",
    "rate_of",
    "report_of",
    "state_of",
    "to_array",
    "variables_of",
    "weight_of",
]
