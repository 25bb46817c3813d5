"""Processes that read their share of one epoch in PyTorch, and may die at any moment.

Each sample has a place in the parameter `weight`, and its gradient is -1 there. So the values on the servers say which
samples were trained on. The readers append the numbers of the samples to a file before each step, a line a batch.
"""

import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, DistributedSampler

import shoal
import shoal.torch
from shoal import optim

BATCH, SAMPLE_S = 4, 0.001


class Numbers(Dataset[int]):
    """The numbers below `samples`, each of which takes a while to load."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> int:
        time.sleep(SAMPLE_S)
        return index


def read_leased(address: str, job: str, samples: int, path: str, worker: str, options: dict[str, Any]) -> None:
    """Trains with `shoal.torch.DataLoader` until the epoch ends. After half of it, waits for a file: PATH.over."""
    torch.set_num_threads(1)
    model = nn.ParameterDict({"weight": nn.Parameter(torch.zeros(samples))})
    with shoal.Client(address) as client, open(path, "a", encoding="utf-8") as seen:
        optimizer = None
        while optimizer is None:
            try:
                optimizer = shoal.torch.DistributedOptimizer(
                    model, optim.SGD(1.0), job=job, workers=2, client=client, batch_size=BATCH, worker=worker, **options
                )
            except shoal.Overloaded:  # the place of a dead process is not free yet
                continue
            except shoal.Cancelled:  # the others have read the rest meanwhile
                return
        with optimizer:
            loading: dict[str, Any] = {"num_workers": 1, "multiprocessing_context": "fork"}
            for batch in shoal.torch.DataLoader(Numbers(samples), session=optimizer, **loading):
                while client.job(job).data().total.done > samples // 2 and not Path(f"{path}.over").exists():
                    time.sleep(0.02)
                seen.write(" ".join(map(str, batch.tolist())) + "\n")
                seen.flush()
                model["weight"].grad = torch.zeros(samples).index_fill_(0, batch, -1.0)
                optimizer.step()


def read_sampled(rank: int, samples: int, path: str) -> None:
    """Reads one epoch with a `DistributedSampler` for two ranks."""
    torch.set_num_threads(1)
    data = Numbers(samples)
    loader = torch.utils.data.DataLoader(data, BATCH, sampler=DistributedSampler(data, num_replicas=2, rank=rank))
    with open(path, "a", encoding="utf-8") as seen:
        for batch in loader:
            seen.write(" ".join(map(str, batch.tolist())) + "\n")
            seen.flush()
