"""A job of PyTorch whose processes are all killed, and which goes on from its checkpoint."""

from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import numpy as np
import pytest

import shoal
from support.clusters.local import local_cluster
from support.waiting import wait_until

pytest.importorskip("torch", reason="`make long` runs without PyTorch, too")

from support.training import torch_curve
from support.training.torch_curve import SAVED, STEPS

STOP = 9


@pytest.fixture
def storing(tmp_path: Path) -> Iterator[shoal.Client]:
    with local_cluster(servers=2, workers=0, checkpoints=str(tmp_path)) as cluster, cluster.client() as client:
        yield client


@pytest.fixture
def train(storing: shoal.Client, forks: ForkServerContext, tmp_path: Path) -> Callable[..., dict[int, float]]:
    """Runs both workers to the end, or kills them at a step. Returns the mean loss over the samples of each step."""

    def run(job: str, stop: int = STEPS) -> dict[int, float]:
        paths = [tmp_path / f"{job}-{stop}-{worker}" for worker in range(2)]
        given = [(storing.address, job, stop, str(path)) for path in paths]
        workers = [forks.Process(target=torch_curve.train, args=it) for it in given]
        for worker in workers:
            worker.start()
        try:
            if stop < STEPS:
                wait_until(lambda: all(last_step(path) == stop - 1 for path in paths), timeout_s=60, what="steps")
            else:
                for worker in workers:
                    worker.join(60)
                assert [worker.exitcode for worker in workers] == [0, 0]
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        steps, losses, samples = np.concatenate([np.loadtxt(path, ndmin=2) for path in paths]).T
        return {int(it): np.average(losses[steps == it], weights=samples[steps == it]) for it in np.unique(steps)}

    return run


def last_step(path: Path) -> int:
    lines = path.read_text().splitlines() if path.exists() else []
    return int(lines[-1].split()[0]) if lines else -1


def test_a_job_that_was_killed_has_the_curve_of_one_that_was_not(
    storing: shoal.Client, train: Callable[..., dict[int, float]]
) -> None:
    whole = train("whole")
    assert [*whole] == [*range(STEPS)]
    before = train("again", STOP)
    assert [*before] == [*range(STOP)]
    storing.job("again").cancel()  # otherwise the same program joins it, and goes on with the values as they are
    after = train("again")
    assert [*after] == [*range(SAVED, STEPS)], "from the checkpoint to the end"
    resumed = {**before, **after}
    np.testing.assert_allclose([*resumed.values()], [*whole.values()], rtol=1e-12)
    expected, values = storing.pull("whole"), storing.pull("again")
    assert expected.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-12, atol=1e-15)
