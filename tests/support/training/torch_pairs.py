"""Optimizers of Shoal and of PyTorch that compute the same, and training with DistributedDataParallel on gloo."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import nn

from shoal import optim
from support.torch_training import alone, arrays, loss_of, network, part

STEPS = 50
CLIP_NORM, DECAY, RATE = 0.2, 0.1, 1e-2
RATES = optim.CosineLR(RATE, steps=STEPS)


@dataclass(frozen=True)
class Pair:
    """An optimizer of Shoal, and its equal of PyTorch.

    Attributes:
        given: that of Shoal.
        plain: returns that of PyTorch for a module.
        bound: the largest difference of two weights after all steps.
        before: called with the module, the optimizer of PyTorch and the step before each update.
    """

    given: optim.Optimizer
    plain: Callable[[nn.Module], torch.optim.Optimizer]
    bound: float
    before: Callable[[nn.Module, Any, int], object] = lambda *_: None


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Returns the groups of PyTorch that `PAIRS` has as groups of Shoal."""
    weights = [it for name, it in model.named_parameters() if not name.endswith("bias")]
    biases = [it for name, it in model.named_parameters() if name.endswith("bias")]
    return [{"params": weights, "weight_decay": DECAY}, {"params": biases, "lr": 2 * RATE, "weight_decay": 0.0}]


def _clip_and_schedule(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
    for group, factor in zip(optimizer.param_groups, (1.0, 2.0), strict=True):
        group["lr"] = RATES.rate(step) * factor


_BIASES = optim.VariableGroup("*bias", rate=2.0, weight_decay=0.0)
PAIRS = {
    "sgd": Pair(optim.SGD(0.1), lambda it: torch.optim.SGD(it.parameters(), 0.1), 1e-12),
    "momentum": Pair(optim.Momentum(0.1), lambda it: torch.optim.SGD(it.parameters(), 0.1, momentum=0.9), 1e-12),
    "adam": Pair(optim.Adam(RATE), lambda it: torch.optim.Adam(it.parameters(), RATE), 1e-10),
    "adamw with groups, a schedule and clipping": Pair(
        optim.AdamW(RATES, weight_decay=DECAY, clip_norm=CLIP_NORM, groups=[_BIASES]),
        lambda it: torch.optim.AdamW(_groups(it), RATE),
        1e-10,
        _clip_and_schedule,
    ),
}


def trained_alone(pair: Pair) -> dict[str, np.ndarray]:
    """Trains in one process of plain PyTorch."""
    model = network()
    optimizer = pair.plain(model)
    return arrays(alone(model, optimizer, STEPS, partial(pair.before, model, optimizer)))


def train_by_ddp(rank: int, place: str) -> None:
    """Trains with each optimizer of PyTorch as one of two ranks, and saves the weights in a folder."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/ranks", rank=rank, world_size=2)
    for name, pair in PAIRS.items():
        model = network()
        optimizer, parallel = pair.plain(model), nn.parallel.DistributedDataParallel(model)
        for step in range(STEPS):
            optimizer.zero_grad()
            loss_of(parallel, *part(step, rank)).backward()
            pair.before(model, optimizer, step)
            optimizer.step()
        np.savez(Path(place, f"{name}-{rank}.npz"), **arrays(model))  # type: ignore[arg-type]
    torch.distributed.destroy_process_group()
