"""Models and loops in PyTorch that the benchmarks of `shoal.torch` train, each with one thread a process.

A loop is a function that takes some steps. Images are in memory, and the same in each step.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import nn

sys.path.append(str(Path(__file__).parents[1] / "peers"))

from torch_nn import resnet18

Loop = Callable[[int], object]
CLASSES, CLIP_NORM, RATE = 10, 1.0, 1e-3
_BATCHES = {"cnn": (64, 1, 28), "resnet18": (32, 3, 32)}  # samples, channels, height and width


def cnn() -> nn.Module:
    """Returns the network of the peers' `torch_ddp.py`: two convolutions with BatchNorm, and two dense layers."""
    body = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    body += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*body, nn.Flatten(), nn.Linear(32 * 49, 128), nn.ReLU(), nn.Linear(128, CLASSES))


def made(name: str) -> nn.Module:
    """Returns a model by its name, "cnn" or "resnet18", with the same values in each process."""
    torch.manual_seed(0)
    return {"cnn": cnn, "resnet18": resnet18}[name]()


def backward_of(name: str, model: nn.Module) -> Callable[[], torch.Tensor]:
    """Returns a function that computes the loss of a batch, and its gradients."""
    samples, channels, size = _BATCHES[name]
    x, y = torch.randn(samples, channels, size, size), torch.randint(0, CLASSES, (samples,))

    def backward() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss

    return backward


def loop_of(optimizer: torch.optim.Optimizer, backward: Callable[[], torch.Tensor]) -> Loop:
    """Returns the usual loop of PyTorch."""

    def run(steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            backward()
            optimizer.step()

    return run


def by_turns(loops: Mapping[str, Loop], turns: int, steps: int) -> Mapping[str, Sequence[float]]:
    """Returns the milliseconds of a step in each turn. The order alternates, so that no loop always comes first."""
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for turn in range(turns):
        for name in list(loops)[:: 1 if turn % 2 else -1]:
            began = time.perf_counter()
            loops[name](steps)
            taken[name].append((time.perf_counter() - began) / steps * 1e3)
    return taken


def compared(taken: Mapping[str, Sequence[float]], mine: str, theirs: str) -> dict[str, float]:
    """Returns the figures of two loops: the median time of a step in one, and the median ratio of the turns."""
    ratio = np.median(np.divide(taken[mine], taken[theirs]))
    return {"ms_per_step": float(np.median(taken[mine])), "ratio": float(ratio)}
