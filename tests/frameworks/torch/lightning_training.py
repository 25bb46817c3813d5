"""A worker that trains a small `LightningModule`: python lightning_training.py COORDINATOR JOB FILE PRECISION.

It follows the recipe of docs/how-to/frameworks.md. The weights go to the file.
"""

import sys
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shoal
import shoal.torch

EPOCHS, SAMPLES, BATCH = 2, 64, 8


def dataset() -> TensorDataset:
    torch.manual_seed(0)
    x = torch.randn(SAMPLES, 6)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


class Line(lightning.LightningModule):
    def __init__(self, address: str, job: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.address, self.job = nn.Linear(6, 1), address, job

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(self.layer(x), y)

    def configure_optimizers(self) -> Any:
        given = shoal.optim.AdamW(3e-2, clip_norm=1.0)
        return shoal.torch.DistributedOptimizer(self, given, job=self.job, workers=2, address=self.address)

    def train_dataloader(self) -> DataLoader[Any]:
        data, rank = dataset(), self.trainer.optimizers[0].session.rank
        return DataLoader(data, BATCH, sampler=DistributedSampler(data, num_replicas=2, rank=rank))


def main(address: str, job: str, path: str, precision: str) -> None:
    given = {"max_epochs": EPOCHS, "devices": 1, "accelerator": "cpu", "precision": precision}
    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(use_distributed_sampler=False, **given, **quiet)
    model = Line(address, job)
    trainer.fit(model)
    torch.save(model.state_dict(), path)


if __name__ == "__main__":
    main(*sys.argv[1:])
