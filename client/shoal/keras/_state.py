"""State of Keras' own optimizers in the form of a job, and back: slots by the paths of variables."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from shoal import errors
from shoal.keras._host import eagerly
from shoal.optim import OptimizerState


@dataclass(frozen=True)
class _Kind:
    """How an optimizer of Keras keeps the slots of a job.

    Attributes:
        suffixes: for each slot, the end of the names of its variables.
        factor: returns, given the learning rate, the factor of Keras' values to those of a job.
    """

    suffixes: Mapping[str, str]
    factor: Callable[[float], float] = lambda _: 1.0


_ADAM = _Kind({"exp_avg": "momentum", "exp_avg_sq": "velocity"})
# The momentum of Keras' SGD is what it adds to a value: minus the rate times the sum of gradients.
_KINDS = {"SGD": _Kind({"momentum_buffer": "momentum"}, lambda rate: -rate), "Adam": _ADAM, "AdamW": _ADAM}
_COUNTS = {"iteration", "learning_rate"}  # names of variables that are no slots


def optimizer_state(optimizer: keras.optimizers.Optimizer, model: keras.Model) -> OptimizerState:
    """Returns the state of an optimizer of Keras, for a job that goes on from it.

        model = keras.saving.load_model("model.keras")
        state = shoal.keras.optimizer_state(model.optimizer, model)

    Args:
        optimizer: an `SGD`, `Adam` or `AdamW` that has trained the model. The learning rate of an `SGD` with momentum
            must have been constant: its momentum has rates of the past in it, and that of a job has not.
        model: the model.

    Raises:
        InvalidOptimizer: the optimizer, or its state, is one that the servers do not have; it has not trained the
            model; or an `SGD` with momentum has the learning rate 0.
    """
    return state_of(optimizer, model.trainable_variables)


def load_optimizer_state(state: OptimizerState, optimizer: keras.optimizers.Optimizer, model: keras.Model) -> None:
    """Puts a state of a job into an optimizer of Keras, which then goes on without Shoal.

        plain = keras.optimizers.Adam(1e-3)
        shoal.keras.load_optimizer_state(session.optimizer_state(), plain, model)
        model.compile(plain, loss="mse")

    Args:
        state: the state of the job.
        optimizer: the optimizer of Keras that computes what the job does. It is built, unless it is already.
        model: the model, with the paths of the job's variables.

    Raises:
        InvalidOptimizer: see `optimizer_state`; or the optimizer has other slots, or lacks variables of the state.
    """
    kind, variables = _kind_of(optimizer), model.trainable_variables
    if other := sorted(state.slots.keys() ^ kind.suffixes.keys()) if _has_slots(optimizer) else [*state.slots]:
        raise errors.InvalidOptimizer(
            f"the job and {type(optimizer).__name__} of Keras differ in the slots {', '.join(other)}; give the "
            "optimizer that computes what the job does"
        )
    with eagerly():
        optimizer.build(variables)
        found = _slot_variables(optimizer, kind, variables)
        for slot, of_paths in found.items():
            if missing := sorted(of_paths.keys() - state.slots[slot].keys()):
                raise errors.InvalidOptimizer(f"the state has no {slot} of {missing[0]!r}; give that of this model")
        factor = kind.factor(_rate(optimizer))
        for slot, of_paths in found.items():
            for path, variable in of_paths.items():
                variable.assign(state.slots[slot][path] * factor)
        optimizer.iterations.assign(state.updates)


def state_of(optimizer: keras.optimizers.Optimizer, variables: Sequence[Any]) -> OptimizerState:
    """Returns the state of an optimizer for these variables; see `optimizer_state`."""
    kind = _kind_of(optimizer)
    if not optimizer.built:
        return OptimizerState()
    with eagerly():
        found = _slot_variables(optimizer, kind, variables)
        factor = kind.factor(_rate(optimizer)) if found else 1.0
        if not factor:
            raise errors.InvalidOptimizer(
                f"the learning rate of {type(optimizer).__name__} is 0, so its momentum does not tell the sum of "
                "gradients; give the optimizer with the rate with which it has trained"
            )
        slots = {
            slot: {path: np.asarray(keras.ops.convert_to_numpy(it)) / factor for path, it in of_paths.items()}
            for slot, of_paths in found.items()
        }
        return OptimizerState(slots, int(keras.ops.convert_to_numpy(optimizer.iterations)))


def _kind_of(optimizer: Any) -> _Kind:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, keras.optimizers.Optimizer) or kind not in _KINDS:
        raise errors.InvalidOptimizer(
            f"the optimizer is {kind}, whose state the servers do not have; give one of keras.optimizers: "
            f"{', '.join(_KINDS)}"
        )
    return _KINDS[kind]


def _has_slots(optimizer: Any) -> bool:
    return not isinstance(optimizer, keras.optimizers.SGD) or bool(optimizer.momentum)


def _rate(optimizer: Any) -> float:
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def _slot_variables(optimizer: Any, kind: _Kind, variables: Sequence[Any]) -> dict[str, dict[str, Any]]:
    """Returns the variables of an optimizer by slot and by the path of the variable that they belong to.

    Raises:
        InvalidOptimizer: the optimizer has other variables, or lacks some.
    """
    own = {it.name: it for it in optimizer.variables if it.name not in _COUNTS}
    suffixes = kind.suffixes if _has_slots(optimizer) else {}
    wanted = {slot: {it.path: _name(it.path, end) for it in variables} for slot, end in suffixes.items()}
    names = [name for of_paths in wanted.values() for name in of_paths.values()]
    if problem := _difference(names, own, [it.name for it in optimizer.variables]):
        raise errors.InvalidOptimizer(
            f"{type(optimizer).__name__} {problem}; give the model that it has trained, and no amsgrad and no use_ema"
        )
    return {slot: {path: own[name] for path, name in of_paths.items()} for slot, of_paths in wanted.items()}


def _difference(wanted: Sequence[str], own: Iterable[str], every: Sequence[str]) -> str:
    """Returns how the variables of an optimizer differ from those that are wanted, by name; "" if they do not."""
    if len({*wanted}) < len(wanted) or len({*every}) < len(every):
        return "has two variables of one name"
    if missing := sorted({*wanted} - {*own}):
        return f"has no variable {missing[0]}"
    more = sorted({*own} - {*wanted})
    return f"has the variable {more[0]}" if more else ""


def _name(path: str, suffix: str) -> str:
    """Returns the name that Keras gives a variable of an optimizer."""
    return f"{path.replace('/', '_')}_{suffix}"


__all__ = ["load_optimizer_state", "optimizer_state", "state_of"]
