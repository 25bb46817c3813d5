"""Files of safetensors: the variables of a job have the names of a module's `state_dict`, both ways."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import shoal
import shoal.torch
from shoal import optim
from support.clusters.local import local_cluster
from support.torch_training import FEATURES, alone, arrays, farthest, name, network


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[tuple[shoal.Client, shoal.Checkpoints]]:
    """A cluster with checkpoint storage, and that storage."""
    folder = tmp_path / "checkpoints"
    with local_cluster(servers=2, workers=0, checkpoints=folder) as cluster, cluster.client() as client:
        yield client, shoal.Checkpoints(folder)


def normalized() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(FEATURES), network()).double()


def test_names_go_round(stored: tuple[shoal.Client, shoal.Checkpoints], tmp_path: Path) -> None:
    client, checkpoints = stored
    model, job = normalized(), name()
    with shoal.torch.DistributedOptimizer(model, optim.Adam(0.1), job=job, client=client) as it:
        alone(model, it, 2)
        it.session.checkpoint()
    checkpoints.export(job, tmp_path / "out.safetensors")
    loaded = normalized()
    loaded.load_state_dict(load_file(tmp_path / "out.safetensors"))
    assert farthest(arrays(model), arrays(loaded)) == 0

    changed = {key: it + 1 for key, it in model.state_dict().items()}
    save_file(changed, tmp_path / "in.safetensors")
    checkpoints.import_file(tmp_path / "in.safetensors", "imported")
    found = normalized()
    options: dict[str, Any] = {"restore": "imported", "partial_restore": True}
    with shoal.torch.DistributedOptimizer(found, optim.Adam(0.1), job=name(), client=client, **options):
        assert all(torch.equal(it, changed[key]) for key, it in found.state_dict().items())
