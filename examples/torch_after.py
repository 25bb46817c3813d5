"""The loop of `torch_before.py` on a cluster: start it on each worker. SHOAL_COORDINATOR names the coordinator."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shoal.optim import AdamW
from shoal.torch import DataLoader, DistributedOptimizer

EPOCHS = 10


def digits() -> TensorDataset:
    with np.load(Path(__file__).with_name("digits.npz")) as found:
        return TensorDataset(
            torch.from_numpy(found["pixels"] / np.float32(16)), torch.from_numpy(found["labels"]).long()
        )


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    model = network()
    given = AdamW(3e-3, clip_norm=1.0)
    optimizer = DistributedOptimizer(model, given, job="digits", workers=2, batch_size=16, epochs=EPOCHS)
    loader = DataLoader(digits(), 16, session=optimizer)
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
