"""A loop in plain PyTorch: a classifier of handwritten digits. `torch_after.py` is the same loop on a cluster."""

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    loader = DataLoader(digits(), 32, shuffle=True)
    for epoch in range(EPOCHS):
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    torch.save(model.state_dict(), "digits.pt")


if __name__ == "__main__":
    main()
