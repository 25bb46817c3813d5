"""PyTorch's side of the training problem: one process that trains on the joined batches, in float64."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.optim import lr_scheduler as schedulers

from support.training import training_problem as problem
from support.training.training_problem import RATE, STEPS, Combination, Result

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "adagrad": (torch.optim.Adagrad, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    "adam": (torch.optim.Adam, {}),
    "adamw": (torch.optim.AdamW, {}),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "constant": lambda o: schedulers.LambdaLR(o, lambda _: 1.0),
    "step": lambda o: schedulers.StepLR(o, 12, 0.5),
    "exponential": lambda o: schedulers.ExponentialLR(o, 0.97),
    "linear": lambda o: schedulers.LinearLR(o, 1.0, 0.2, total_iters=40),
    "piecewise": lambda o: schedulers.LambdaLR(o, lambda v: 1.0 if v < 15 else 0.5 if v < 35 else 0.125),
    "interpolated": lambda o: schedulers.LambdaLR(o, lambda v: float(np.interp(v, [0, 15, 35], [1, 2, 0.125]))),
    "cosine": lambda o: schedulers.CosineAnnealingLR(o, STEPS),
    "warmcosine": lambda o: schedulers.SequentialLR(
        o, [schedulers.LinearLR(o, 0.1, total_iters=9), schedulers.CosineAnnealingLR(o, 40)], [10]
    ),
    "onecycle": lambda o: schedulers.OneCycleLR(
        o, [group["lr"] for group in o.param_groups], total_steps=STEPS, cycle_momentum=False
    ),
    "plateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1, threshold=0.2, cooldown=1),
}


def train(combination: Combination) -> Result:
    """Returns what PyTorch makes of a combination."""
    params = {name: torch.from_numpy(value.copy()).requires_grad_() for name, value in problem.start().items()}
    optimizer = _optimizer(combination, params)
    scheduler = SCHEDULERS[combination.schedule](optimizer)
    clipped_steps = reductions = 0
    for step in range(STEPS):
        if combination.has_plateaus and step in problem.EVALUATION_STEPS:
            with torch.no_grad():
                loss = _loss(params, STEPS)
            before = scheduler.get_last_lr()
            scheduler.step(loss)
            reductions += int(before != scheduler.get_last_lr())
        optimizer.zero_grad()
        _loss(params, step).backward()
        if combination.clips:
            norm = torch.nn.utils.clip_grad_norm_([p for p in params.values() if p.requires_grad], problem.CLIP_NORM)
            clipped_steps += int(norm > problem.CLIP_NORM)
        optimizer.step()
        if not combination.has_plateaus:
            scheduler.step()
    return Result({name: value.detach().numpy() for name, value in params.items()}, clipped_steps, reductions)


def _optimizer(combination: Combination, params: dict[str, Any]) -> Any:
    """Returns the optimizer, with the parameter groups that `training_problem.GROUPS` describes."""
    built, settings = OPTIMIZERS[combination.optimizer]
    groups: list[dict[str, Any]] = [{"params": list(params.values())}]
    if combination.grouped:
        params["embed"].requires_grad_(False)
        groups = [
            {"params": [params["hidden"]]},
            {"params": [params["hidden_bias"], params["out_bias"]], "weight_decay": 0.0},
            {"params": [params["out"]], "lr": 3 * RATE},
        ]
    return built(groups, lr=RATE, weight_decay=problem.WEIGHT_DECAY, **settings)


def _loss(params: dict[str, Any], step: int) -> Any:
    x, y = map(torch.from_numpy, problem.batch(step))
    hidden = torch.tanh(x @ params["embed"] @ params["hidden"] + params["hidden_bias"])
    return ((hidden @ params["out"] + params["out_bias"] - y) ** 2).mean()
