"""Workers that are killed within an epoch: no sample is missed. Those of a `DistributedSampler` are lost."""

import itertools
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import shoal
from shoal.data._reading import ShuffledSamples
from shoal.status import JobState
from support import run_lengths
from support.waiting import wait_until

pytest.importorskip("torch", reason="`make long` runs without PyTorch, too")

from support.training import torch_reader

DEATHS = run_lengths.runs(3, 20)
SAMPLES = 600 * DEATHS
MODES = {"asynchronous": shoal.Asynchronous(), "synchronous": shoal.Synchronous()}


class Readers:
    """Two processes with a session each, which are killed and replaced."""

    def __init__(self, client: shoal.Client, forks: ForkServerContext, job: str, path: Path, **options: Any) -> None:
        self._client, self._forks, self.job, self.path = client, forks, job, path
        self._options, self._births = options, itertools.count()
        self._loaders: list[psutil.Process] = []  # of readers that were killed
        self._living = [self._born() for _ in range(2)]
        self.held = Counter[int]()  # by place of the order, the number of deaths of a reader that had leased it

    def _born(self) -> tuple[str, ForkServerProcess]:
        name = f"reader-{next(self._births)}"
        given = (self._client.address, self.job, SAMPLES, str(self.path), name, self._options)
        process = self._forks.Process(target=torch_reader.read_leased, args=given)
        process.start()
        return name, process

    def leased(self, name: str) -> list[range]:
        """Returns the places of the order that a reader has leased."""
        try:
            return [range(it.start, it.stop) for it in self._client.job(self.job).data().held if it.worker == name]
        except shoal.UnknownJob:
            return []

    def kill(self, victim: int, after_s: float) -> None:
        """Kills a reader a while after it has leased a range, and starts another one."""
        name, process = self._living[victim]
        wait_until(partial(self.leased, name), timeout_s=60, what=f"a range of {name}")
        time.sleep(after_s)
        self._kill(process)
        for places in self.leased(name):
            self.held.update(places)
        self._living[victim] = self._born()

    def _kill(self, process: ForkServerProcess) -> None:
        with suppress(psutil.NoSuchProcess):
            reader = psutil.Process(process.pid)
            reader.suspend()  # it starts no more of them
            self._loaders += reader.children(recursive=True)
        process.kill()
        process.join()

    def end(self) -> None:
        for _, process in self._living:
            self._kill(process)
        # A process of a loader ends by itself if its parent dies, unless the parent dies before it knows it.
        _, alive = psutil.wait_procs(self._loaders, timeout=8)
        for loader in alive:
            loader.kill()

    def join(self) -> None:
        for _, process in self._living:
            process.join(60 + SAMPLES / 100)
            assert process.exitcode == 0


@pytest.fixture
def readers(
    client: shoal.Client, forks: ForkServerContext, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Readers]:
    mode: str = request.param
    (tmp_path / "seen").touch()
    found = Readers(client, forks, f"deaths-{mode}", tmp_path / "seen", consistency=MODES[mode])
    yield found
    found.end()


@pytest.mark.timeout(120 + 10 * DEATHS)
@pytest.mark.parametrize("readers", sorted(MODES), indirect=True)
def test_no_sample_is_missed_and_only_leased_ranges_are_repeated(client: shoal.Client, readers: Readers) -> None:
    chance, job = np.random.default_rng(25), readers.job
    with run_lengths.count_runs("torch_deaths", DEATHS, "samples repeated") as rows:
        for _ in range(DEATHS):
            readers.kill(int(chance.integers(2)), float(chance.uniform(0, 0.3)))
        assert client.job(job).status().state is JobState.RUNNING, "the deaths are within the epoch"
        Path(f"{readers.path}.over").touch()
        readers.join()
        trained = client.pull(job)["weight"]
        assert (trained > 0).all(), f"{(trained == 0).sum()} samples are missed"
        times = Counter(int(number) for number in readers.path.read_text().split())
        order = np.concatenate([*ShuffledSamples(SAMPLES, 0).numbers(0, 0, SAMPLES)])
        repeats = {place: times[int(number)] - 1 for place, number in enumerate(order)}
        assert not {it: many for it, many in repeats.items() if many > readers.held[it]}
        rows.passes(sum(repeats.values()), DEATHS)
        print(f"{DEATHS} deaths, {SAMPLES} samples: none missed, {sum(repeats.values())} trained on again")


def test_a_distributed_sampler_loses_the_rest_of_a_killed_rank(forks: ForkServerContext, tmp_path: Path) -> None:
    paths = [tmp_path / str(rank) for rank in range(2)]
    ranks = [
        forks.Process(target=torch_reader.read_sampled, args=(rank, SAMPLES, str(path)))
        for rank, path in enumerate(paths)
    ]
    for rank in ranks:
        rank.start()
    wait_until(lambda: paths[0].exists() and paths[0].read_text().count("\n") > 10, timeout_s=60, what="batches")
    ranks[0].kill()
    for rank in ranks:
        rank.join(60 + SAMPLES / 100)
    lost = SAMPLES - len({int(number) for path in paths for number in path.read_text().split()})
    print(f"1 death, {SAMPLES} samples: {lost} missed")
    assert lost == SAMPLES // 2 - len(paths[0].read_text().split()) > 0
