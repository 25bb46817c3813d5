"""State of PyTorch's own optimizers in the form of a job, and back: slots by the names of parameters."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from shoal import errors
from shoal._system import check_count, listed
from shoal.optim import OptimizerState
from shoal.torch._tensors import named_parameters, to_array, to_tensor

# For each optimizer of PyTorch, its name of each slot that the servers have, too.
_ADAM = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
_KEYS: Mapping[str, Mapping[str, str]] = {
    "SGD": {"momentum_buffer": "momentum_buffer"},
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Adagrad": {"accumulator": "sum"},
    "RMSprop": {"square_avg": "square_avg", "grad_avg": "grad_avg", "momentum_buffer": "momentum_buffer"},
}
# Those whose updates depend on the number of updates of each parameter.
_COUNTING = {"Adam", "AdamW"}
_STEP = "step"
# Settings of a group without which PyTorch has no such state.
_OPTIONAL = {"momentum_buffer": "momentum", "grad_avg": "centered", "max_exp_avg_sq": "amsgrad"}


def optimizer_state(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, *, updates: int | None = None
) -> OptimizerState:
    """Returns the state of an optimizer of PyTorch, for a job that goes on from it.

        plain = torch.optim.Adam(model.parameters(), 1e-3)
        plain.load_state_dict(torch.load("optimizer.pt", weights_only=True))
        state = shoal.torch.optimizer_state(plain, model)

    Args:
        optimizer: an `SGD`, `Adam`, `AdamW`, `Adagrad` or `RMSprop` with parameters of the module.
        model: the module. A parameter that it shares between modules has its first name.
        updates: the number of updates, for schedules. None means that of the optimizer; PyTorch's `SGD` counts none.

    Returns:
        The state. A parameter that the optimizer has no state of, such as a frozen one, is left out.

    Raises:
        InvalidOptimizer: it is an optimizer, or has a state, that the servers do not have; it has parameters of another
            module; or its parameters have taken different numbers of steps.
        BadRequest: `updates` is not a whole number of at least 0.
    """
    keys, names = _keys_of(optimizer), _names(optimizer, model)
    states = {names[it]: state for it, state in optimizer.state.items() if state and it.requires_grad}
    slots: dict[str, dict[str, np.ndarray]] = {}
    for slot, key in keys.items():
        found = {name: to_array(state[key]) for name, state in states.items() if state.get(key) is not None}
        if found:
            slots[slot] = found
    problems = sorted({str(key) for it in states.values() for key in it} - {*keys.values(), _STEP})
    if problems:
        raise errors.InvalidOptimizer(
            f"the state of {type(optimizer).__name__} has {', '.join(problems)}, which the servers do not keep; train "
            "without the setting that makes it, such as amsgrad"
        )
    counted = _updates(optimizer, states)
    return OptimizerState(slots, counted if updates is None else check_count("updates", updates))


def state_dict_for(state: OptimizerState, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[str, Any]:
    """Returns a state of a job as one that an optimizer of PyTorch loads.

        plain = torch.optim.Adam(model.parameters(), 1e-3)
        plain.load_state_dict(shoal.torch.state_dict_for(session.optimizer_state(), plain, model))

    Args:
        state: the state of the job.
        optimizer: the optimizer that is to load the result. It has parameters of the module, and does not change.
        model: the module, with the names of the job's variables.

    Returns:
        The state, with the groups and settings of the optimizer. The tensors are copies.

    Raises:
        InvalidOptimizer: the optimizer has other slots, also because of a setting such as `momentum`, or lacks a
            parameter that the state has.
    """
    keys, names = _keys_of(optimizer), _names(optimizer, model)
    if unknown := sorted(state.slots.keys() - keys.keys()):
        raise errors.InvalidOptimizer(
            f"the job has the slots {', '.join(unknown)}, which {type(optimizer).__name__} of PyTorch does not have; "
            "give the optimizer that computes what the job does"
        )
    kept = {keys[slot] for slot in state.slots}
    for key, setting in _OPTIONAL.items():
        if any(bool(group.get(setting)) != (key in kept) for group in optimizer.param_groups):
            has, must = ("the", "set") if key in kept else ("no", "off")
            raise errors.InvalidOptimizer(
                f"the job has {has} slot {key}, so {setting} of the optimizer must be {must} in all groups; give the "
                "optimizer that computes what the job does"
            )
    known = {*names.values()}
    if missing := sorted({name for arrays in state.slots.values() for name in arrays} - known):
        raise errors.InvalidOptimizer(
            f"the optimizer lacks parameters that the job trains: {listed(missing)}; give it all of them"
        )
    found = optimizer.state_dict()
    order = [it for group in optimizer.param_groups for it in group["params"]]
    states = {index: _state(state, keys, names[it], type(optimizer).__name__) for index, it in enumerate(order)}
    return {**found, "state": {index: it for index, it in states.items() if it}}


def _state(state: OptimizerState, keys: Mapping[str, str], name: str, kind: str) -> dict[str, torch.Tensor]:
    """Returns the state of one parameter, in PyTorch's names; empty if it has none."""
    found = {keys[slot]: to_tensor(arrays[name].copy()) for slot, arrays in state.slots.items() if name in arrays}
    counts = found and kind != "SGD"
    return {**({_STEP: torch.tensor(float(state.updates))} if counts else {}), **found}


def _keys_of(optimizer: torch.optim.Optimizer) -> Mapping[str, str]:
    kind = type(optimizer).__name__
    if not isinstance(optimizer, torch.optim.Optimizer) or kind not in _KEYS:
        raise errors.InvalidOptimizer(
            f"the optimizer is {kind}, whose state the servers do not have; give one of torch.optim: {', '.join(_KEYS)}"
        )
    return _KEYS[kind]


def _names(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> dict[torch.Tensor, str]:
    """Returns the name of each parameter of an optimizer in the module."""
    known: dict[Any, str] = {it: name for name, it in named_parameters(model).items()}
    its = [it for group in optimizer.param_groups for it in group["params"]]
    if strangers := len([it for it in its if it not in known]):
        raise errors.InvalidOptimizer(
            f"{strangers} of {len(its)} parameters of the optimizer are not in the module; give the module that it was "
            "made for"
        )
    return {it: known[it] for it in its}


def _updates(optimizer: torch.optim.Optimizer, states: Mapping[str, Mapping[str, Any]]) -> int:
    """Returns the number of updates of all parameters."""
    steps = {name: round(float(state[_STEP])) for name, state in states.items() if _STEP in state}
    if len({*steps.values()}) > 1 and type(optimizer).__name__ in _COUNTING:
        shown = listed([f"{name} has taken {step} steps" for name, step in _first_of_each(steps.items())])
        raise errors.InvalidOptimizer(
            f"{shown}, and the servers count the updates of all parameters together; give a state whose parameters "
            "have taken the same number of steps"
        )
    return max(steps.values(), default=0)


def _first_of_each(steps: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    """Returns the first parameter of each number of steps."""
    firsts: dict[int, str] = {}
    for name, step in steps:
        firsts.setdefault(step, name)
    return [(name, step) for step, name in firsts.items()]


__all__ = ["optimizer_state", "state_dict_for"]
