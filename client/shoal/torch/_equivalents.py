"""Optimizers of Shoal that compute the same as those of other libraries, for messages."""

import glob
from collections.abc import Mapping
from itertools import count
from typing import Any, cast

import torch

from shoal import errors, optim


def checked_optimizer(optimizer: Any) -> optim.Optimizer | None:
    """Returns an optimizer of Shoal, or None.

    Args:
        optimizer: what the user gave.

    Raises:
        InvalidOptimizer: it is something else. If it is an optimizer of PyTorch, the message has its equivalent.
    """
    if optimizer is None or isinstance(optimizer, optim.Optimizer):
        return optimizer
    what = f"{type(optimizer).__module__.partition('.')[0]}.{type(optimizer).__name__}"
    advice = "give one of shoal.optim, such as shoal.optim.AdamW(1e-3)"
    if isinstance(optimizer, torch.optim.Optimizer) and _names(optimizer)[0]:
        try:
            advice = f"the servers update the values, so give {_equivalent(optimizer)}"
        except errors.InvalidOptimizer as error:
            advice = f"{error.message}, such as shoal.optim.AdamW(1e-3)"
    raise errors.InvalidOptimizer(f"the optimizer is {what}; {advice}")


def _equivalent(optimizer: torch.optim.Optimizer) -> str:
    """Returns the expression of Shoal's optimizer that computes the same as one of PyTorch.

    Raises:
        InvalidOptimizer: Shoal has not all of its settings.
    """
    numbers = count()
    same = converted(optimizer, {it: str(next(numbers)) for group in optimizer.param_groups for it in group["params"]})
    given, (name, names) = max(optimizer.param_groups, key=lambda it: len(it["params"])), _names(optimizer)
    arguments = [repr(float(given["lr"])), *(f"{key}={given[key]!r}" for key in names)]
    if same.groups:
        arguments.append("groups=[shoal.optim.VariableGroup(PATTERN, rate=..., weight_decay=...)]")
    return f"shoal.optim.{name}({', '.join(arguments)})"


def converted(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    *,
    clip_norm: float = 0.0,
) -> optim.Optimizer:
    """Returns the optimizer of Shoal that computes the same as one of PyTorch, with its groups of parameters.

    Args:
        optimizer: the optimizer of PyTorch, which has taken no step.
        names: the name of each parameter in the module.
        clip_norm: see `shoal.optim.Optimizer`.

    Raises:
        InvalidOptimizer: Shoal has no such optimizer, or not all of its settings.
    """
    name, keys = _names(optimizer)
    if not name:
        raise errors.InvalidOptimizer(
            f"the optimizer is {type(optimizer).__name__}, which the servers do not have; give one of shoal.optim"
        )
    groups = [it for it in optimizer.param_groups if it["params"]]
    base = max(groups, key=lambda it: len(it["params"]))
    ignored = {*keys, *_WITHOUT_EFFECT}
    for group in groups:
        for key, value in group.items():
            if (key not in ignored and value != optimizer.defaults.get(key)) or (key in _OFF and value):
                raise errors.InvalidOptimizer(
                    f"{name} has {key}={value!r}, which the servers cannot do; leave {key} out, or give an optimizer "
                    "of shoal.optim"
                )
            if key in keys and key != "weight_decay" and value != base[key]:
                raise errors.InvalidOptimizer(
                    f"groups have {key}={value!r} and {key}={base[key]!r}; they can differ only in lr and weight_decay"
                )
    own = [
        optim.VariableGroup(
            glob.escape(names[parameter]), rate=_ratio(it["lr"], base["lr"]), weight_decay=it["weight_decay"]
        )
        for it in groups
        if (it["lr"], it["weight_decay"]) != (base["lr"], base["weight_decay"])
        for parameter in it["params"]
    ]
    kind: Any = getattr(optim, name)
    return cast(
        "optim.Optimizer", kind(float(base["lr"]), groups=own, clip_norm=clip_norm, **{key: base[key] for key in keys})
    )


# Settings of groups that change no result, or that are handled by themselves.
_WITHOUT_EFFECT = {"params", "param_names", "lr", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
# Settings that the servers do not have.
_OFF = {"amsgrad", "maximize", "dampening", "lr_decay"}


def _ratio(rate: float, base: float) -> float:
    return float(rate / base) if base else 1.0


def _names(optimizer: torch.optim.Optimizer) -> tuple[str, tuple[str, ...]]:
    """Returns the name of Shoal's optimizer and of its arguments that both libraries have; "" if there is none."""
    match type(optimizer).__name__:
        case "SGD" if optimizer.param_groups[0]["momentum"]:
            return "Momentum", ("momentum", "nesterov", "weight_decay")
        case "SGD":
            return "SGD", ("weight_decay",)
        case "Adam" | "AdamW" as name:
            decoupled = optimizer.param_groups[0].get("decoupled_weight_decay", False)
            return "AdamW" if decoupled else name, ("betas", "eps", "weight_decay")
        case "RMSprop":
            return "RMSProp", ("alpha", "eps", "momentum", "centered", "weight_decay")
        case "Adagrad":
            return "Adagrad", ("initial_accumulator_value", "eps", "weight_decay")
    return "", ()


__all__ = ["checked_optimizer", "converted"]
