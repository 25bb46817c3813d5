"""Two synchronous workers have the weights of one process, and those of DistributedDataParallel, up to rounding."""

from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import pytest

import shoal

pytest.importorskip("torch", reason="`make long` runs without PyTorch, too")

from support.torch_training import farthest, trained
from support.training import torch_pairs
from support.training.torch_pairs import PAIRS, STEPS


@pytest.fixture(scope="module")
def by_ddp(forks: ForkServerContext, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trains in two processes with DistributedDataParallel. Returns the folder with their weights."""
    place = tmp_path_factory.mktemp("ddp")
    ranks = [forks.Process(target=torch_pairs.train_by_ddp, args=(rank, str(place))) for rank in range(2)]
    for process in ranks:
        process.start()
    try:
        for process in ranks:
            process.join(60)
        assert [process.exitcode for process in ranks] == [0, 0]
    finally:
        for process in ranks:
            process.kill()
            process.join()
    return place


@pytest.mark.parametrize("name", PAIRS)
def test_two_synchronous_workers(client: shoal.Client, by_ddp: Path, name: str) -> None:
    pair = PAIRS[name]
    alone = torch_pairs.trained_alone(pair)
    with np.load(by_ddp / f"{name}-0.npz") as found:
        parallel = {it: found[it] for it in found.files}
    workers = trained(client, pair.given, STEPS)
    distances = [farthest(wanted, found) for wanted in (alone, parallel) for found in workers]
    print(f"{name}: {max(distances[:2]):.1e} from one process, {max(distances[2:]):.1e} from DDP")
    assert max(distances) <= pair.bound
