"""A program in PyTorch: the digits of `digits.py`, with a module whose gradients autograd computes.

    pip install torch                                          into the environment of Shoal
    shoal up --path examples                                   in one terminal
    shoal submit torch_digits:TorchDigits --workers 2 --epochs 10 --optimizer adam:lr=0.003 --metric accuracy --follow

The variables are the module's parameters, by their names in PyTorch ("0.weight"). The servers own the values, so the
worker copies them into the module before each batch. The servers also run the optimizer.
"""

from collections.abc import Mapping

import numpy as np
import torch
from digits import CLASSES, PIXELS, Digits
from torch import nn

import shoal


class TorchDigits:
    """The program. See `shoal.Program`.

    Args:
        hidden: units of the hidden layer.
        seed: chooses the held-out images and the initial values. It is the same on every worker.
    """

    def __init__(self, hidden: int = 64, seed: int = 0) -> None:
        data = Digits(seed=seed)
        self.dataset, self.held_out = data.dataset, data.held_out
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(PIXELS, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))

    def variables(self) -> dict[str, np.ndarray]:
        """Returns PyTorch's initial values."""
        return {name: p.detach().numpy().copy() for name, p in self.net.named_parameters()}

    def loss_and_gradients(
        self, params: Mapping[str, np.ndarray], batch: tuple[np.ndarray, np.ndarray]
    ) -> shoal.StepOutput:
        """Returns the mean cross-entropy of a batch, and its gradients."""
        self._load(params)
        self.net.zero_grad()
        loss = self._loss(batch)
        loss.backward()
        return shoal.StepOutput(loss.item(), {name: p.grad.numpy() for name, p in self.net.named_parameters()})

    def evaluate(self, params: Mapping[str, np.ndarray], batch: tuple[np.ndarray, np.ndarray]) -> dict[str, float]:
        """Returns the metrics of a batch of the held-out images. See `shoal.program.EvaluatedProgram`."""
        self._load(params)
        x, targets = map(torch.from_numpy, batch)
        with torch.no_grad():
            right = self.net(x).argmax(dim=1) == targets.argmax(dim=1)
            return {"loss": self._loss(batch).item(), "accuracy": right.float().mean().item()}

    def _load(self, params: Mapping[str, np.ndarray]) -> None:
        with torch.no_grad():
            for name, p in self.net.named_parameters():
                p.copy_(torch.from_numpy(params[name]))

    def _loss(self, batch: tuple[np.ndarray, np.ndarray]) -> torch.Tensor:
        x, targets = map(torch.from_numpy, batch)
        return nn.functional.cross_entropy(self.net(x), targets)
