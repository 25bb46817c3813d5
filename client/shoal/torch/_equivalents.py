"""Optimizers of Shoal that compute the same as those of other libraries, for messages."""

from typing import Any

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
    if isinstance(optimizer, torch.optim.Optimizer) and (same := equivalent(optimizer)):
        advice = f"the servers update the values, so give {same}"
    raise errors.InvalidOptimizer(f"the optimizer is {what}; {advice}")


def equivalent(optimizer: torch.optim.Optimizer) -> str:
    """Returns the expression of Shoal's optimizer that computes the same as one of PyTorch; "" if there is none."""
    given = optimizer.param_groups[0]
    names: tuple[str, ...]  # of arguments that both libraries have
    match type(optimizer).__name__:
        case "SGD" if given["momentum"]:
            name, names = "Momentum", ("momentum", "nesterov", "weight_decay")
        case "SGD":
            name, names = "SGD", ("weight_decay",)
        case "Adam" | "AdamW" as name:
            names = ("betas", "eps", "weight_decay")
        case "RMSprop":
            name, names = "RMSProp", ("alpha", "eps", "momentum", "centered", "weight_decay")
        case "Adagrad":
            name, names = "Adagrad", ("initial_accumulator_value", "eps", "weight_decay")
        case _:
            return ""
    arguments = [repr(float(given["lr"])), *(f"{key}={given[key]!r}" for key in names)]
    return f"shoal.optim.{name}({', '.join(arguments)})"


__all__ = ["checked_optimizer", "equivalent"]
