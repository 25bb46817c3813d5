"""Training of small modules of PyTorch by several workers, and by one process without Shoal."""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import numpy as np
import torch
from torch import nn

import shoal
import shoal.torch

FEATURES, CLASSES, BATCH = 12, 4, 8
_names = count()


def name() -> str:
    """Returns a new name of a job."""
    return f"torch-{next(_names)}"


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, CLASSES)).to(dtype)


def batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, FEATURES, generator=draw, dtype=torch.float64).to(dtype)
    return x, torch.randint(0, CLASSES, (BATCH,), generator=draw)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x).to(torch.float64), y)


def alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, before: Callable[[int], object] = lambda _: None
) -> nn.Module:
    """Trains a module in plain PyTorch; `before` is called before each update."""
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, *batch(step)).backward()
        before(step)
        optimizer.step()
    return model


def together(work: Callable[[int], Any], workers: int = 2) -> list[Any]:
    """Calls a function for each rank, each on a thread, and returns what they return."""
    with ThreadPoolExecutor(workers) as pool:
        return [*pool.map(work, range(workers))]


def part(step: int, rank: int, workers: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the rows of a batch that a worker trains on."""
    x, y = batch(step)
    rows = slice(rank * BATCH // workers, (rank + 1) * BATCH // workers)
    return x[rows], y[rows]


def trained(
    client: shoal.Client,
    optimizer: shoal.optim.Optimizer,
    steps: int,
    *,
    model: Callable[[], nn.Module] = network,
    after_backward: Callable[[nn.Module], object] = lambda _: None,
    **options: Any,
) -> list[dict[str, np.ndarray]]:
    """Trains a module with two workers. Returns the parameters and buffers of both."""
    job = name()
    models = [model() for _ in range(2)]  # not on the threads, which share the generator of random numbers

    def work(rank: int) -> dict[str, np.ndarray]:
        own = models[rank]
        with shoal.torch.DistributedOptimizer(own, optimizer, job=job, workers=2, client=client, **options) as it:
            for step in range(steps):
                it.zero_grad()
                loss_of(own, *part(step, it.session.rank)).backward()
                after_backward(own)
                it.step()
        return arrays(own)

    return together(work)


def arrays(model: nn.Module) -> dict[str, np.ndarray]:
    return {name: it.detach().double().numpy().copy() for name, it in model.state_dict().items()}


def farthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray], names: Iterable[str] = ()) -> float:
    """Returns the largest difference of two elements."""
    return max(float(np.abs(one[name] - other[name]).max()) for name in names or one)
