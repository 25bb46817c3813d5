"""State of an optimizer beside the values: its slots and its number of updates, as users give and get them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal._limits import catalogue
from shoal._numerics import storage_dtype
from shoal._system import check_count, listed
from shoal.errors import InvalidOptimizer
from shoal.initializers import Given
from shoal.optim._optimizers import Optimizer
from shoal.variables import Variable

# Arrays by slot and variable.
ArraysBySlot = Mapping[str, Mapping[str, np.ndarray]]


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer has beside the values: its slots, and the number of updates that the values have received.

        state = OptimizerState({"exp_avg": {"w": m}, "exp_avg_sq": {"w": v}}, updates=1_000)
        session = client.session("m", variables={"w": w}, optimizer=Adam(1e-3), optimizer_state=state)

    `Optimizer.slots` has the names of an optimizer's slots.

    Args:
        slots: for each slot, arrays by variable: a dict by name, or a tree as for the variables. A trainable variable
            that is left out begins as in a new job.
        updates: the number of updates, 0 or more. Schedules, and the bias correction of Adam, continue from it.

    Raises:
        BadRequest: `updates` is not a whole number of at least 0.
        InvalidOptimizer: `slots` is not a dict by the names of slots, or there are too many updates.
    """

    slots: Mapping[str, Any] = field(default_factory=dict)
    updates: int = 0

    def __post_init__(self) -> None:
        slots: object = self.slots
        if not isinstance(slots, Mapping) or not all(isinstance(name, str) for name in slots):
            raise InvalidOptimizer(
                f"the slots of an optimizer state are {slots!r:.200}; give a dict by the names of slots, such as "
                "{'momentum_buffer': {'w': np.zeros(3)}}"
            )
        object.__setattr__(self, "updates", check_count("updates", self.updates))
        if self.updates >= catalogue.MAX_STEP.default:
            raise InvalidOptimizer(
                f"updates is {self.updates}; the limit MAX_STEP is {catalogue.MAX_STEP.default}: give a smaller number"
            )


def checked_state(state: OptimizerState, optimizer: Optimizer, variables: Mapping[str, Variable]) -> OptimizerState:
    """Returns a state for a new job: for each slot, an array for each trainable variable, as servers keep it.

    Args:
        state: the state. Each slot has arrays by the names of variables.
        optimizer: the optimizer of the job.
        variables: the variables of the job.

    Raises:
        InvalidOptimizer: the optimizer has other slots; there are arrays for other variables, or of another shape or
            dtype; or an array has values that the slot cannot have. The message lists all of these problems.
    """
    if problems := [*_problems(state.slots, optimizer, variables)]:
        raise InvalidOptimizer(f"the optimizer state does not fit the job: {listed(problems)}")
    trained = {name: it for name, it in variables.items() if it.trainable}
    kept = {
        slot: {
            name: _kept(state.slots[slot].get(name), optimizer.initial(slot), variable)
            for name, variable in trained.items()
        }
        for slot in state.slots
    }
    return OptimizerState(kept, state.updates)


def _kept(array: np.ndarray | None, initial: float, variable: Variable) -> np.ndarray:
    """Returns a slot of a variable in the dtype that servers keep: the given values, or the initial ones."""
    dtype = storage_dtype(variable.dtype)
    return np.full(variable.shape, initial, dtype) if array is None else array.astype(dtype, copy=False)


def _problems(slots: ArraysBySlot, optimizer: Optimizer, variables: Mapping[str, Variable]) -> Iterator[str]:
    known = f"the slots of {optimizer.name} are {', '.join(optimizer.slots)}" if optimizer.slots else ""
    for slot in sorted(slots.keys() - set(optimizer.slots)):
        yield f"{optimizer.name} has no slot {slot!r}; {known or 'it has none, so leave the slots out'}"
    if slots and (missing := [slot for slot in optimizer.slots if slot not in slots]):
        yield f"{', '.join(missing)} is missing; {known}: give all of them, or none"
    if not any(it.trainable and isinstance(it.initializer, Given) for it in variables.values()):
        yield "no trainable variable has given values; give the values of the variables as arrays, too"
    least = {it.name: it.least for it in optimizer.possible_slots}
    for slot in optimizer.slots:
        for name, array in slots.get(slot, {}).items():
            if problem := _problem(array, variables.get(name), least[slot]):
                yield f"{slot} of {name!r} {problem}"


def _problem(array: np.ndarray, variable: Variable | None, least: float) -> str:
    """Returns what is wrong with the array of one slot of one variable, and what to do; "" if it fits."""
    if variable is None:
        return "is there, but the job has no such variable; leave it out"
    if not variable.trainable:
        return "is there, but the variable is not trainable; leave it out"
    if not isinstance(variable.initializer, Given):
        return "is there, but the variable has a rule for its initial values; give its values as an array, too"
    wanted = storage_dtype(variable.dtype)
    if array.shape != variable.shape:
        return f"has the shape {array.shape}; give the shape of the variable, {variable.shape}"
    if array.dtype not in (wanted, variable.dtype):
        return f"is {array.dtype}; cast it to {wanted}"
    if not np.isfinite(array).all():
        return "has NaN or Inf; give finite values"
    if array.size and (smallest := array.min()) < least:
        return f"has {smallest}; its values are at least {least:g}"
    return ""


__all__ = ["OptimizerState", "checked_state"]
