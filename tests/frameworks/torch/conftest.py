"""Fixtures of the tests with PyTorch. Workers are threads, each with a session of its own."""

from collections.abc import Iterator

import pytest
import torch

import shoal
from support.clusters.local import local_cluster


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def client() -> Iterator[shoal.Client]:
    with local_cluster(servers=2, workers=0) as cluster, cluster.client() as client:
        yield client
