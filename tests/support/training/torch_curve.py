"""One of the two workers of a PyTorch job, which writes its curve to a file and may be killed.

After four steps, rank 0 takes the checkpoint that the same call goes on from.
"""

import time
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal import Client, optim
from shoal.torch import DataLoader, DistributedOptimizer

SAMPLES, EPOCHS, BATCH = 120, 2, 5
STEPS = SAMPLES * EPOCHS // (2 * BATCH)
SAVED = 4


def train(address: str, job: str, stop: int, path: str) -> None:
    """Writes a line for each step: the step, the loss of the batch, and its samples. At the step `stop` it waits."""
    torch.set_num_threads(1)
    torch.manual_seed(7)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = torch.randn(SAMPLES, 4, dtype=torch.double)
    data = TensorDataset(x, torch.sin(x.sum(1, keepdim=True)))
    given = optim.AdamW(optim.CosineLR(0.05, STEPS), weight_decay=0.01, clip_norm=1.0)
    data_options = {"batch_size": BATCH, "range_size": 15, "epochs": EPOCHS, "seed": 3}
    options: dict[str, Any] = {"workers": 2, "restore": "auto", **data_options}
    with (
        open(path, "a", encoding="utf-8") as curve,
        Client(address) as client,
        DistributedOptimizer(model, given, job=job, client=client, **options) as optimizer,
    ):
        loader = DataLoader(data, session=optimizer)
        for _ in range(EPOCHS):
            for inputs, targets in loader:
                step = optimizer.session.step
                if step == SAVED and optimizer.session.rank == 0:
                    optimizer.session.checkpoint(timeout_s=20)
                while step == stop:
                    time.sleep(1)
                optimizer.zero_grad()
                loss = nn.functional.mse_loss(model(inputs), targets)
                loss.backward()
                optimizer.step()
                print(step, loss.item(), len(inputs), file=curve, flush=True)
