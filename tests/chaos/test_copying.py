"""Copies that are interrupted while they are made, and jobs that lose both copies."""

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import optim
from support import run_lengths
from support.clusters.cluster_probe import placement
from support.clusters.local import local_cluster
from support.faults import crashing_server
from support.training.exact_training import exact_training
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

RUNS = run_lengths.runs(1, 10)
# Elements of each of the six variables of the copies: 5 MB and 96 MB together.
ELEMENTS = run_lengths.size(200_000, 4_000_000)
MOMENTS = run_lengths.size(["cut copy"], ["cut copy", "cut inputs", "kill backup"])
SIZE, WORKERS = 512, 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shoal.LocalCluster]:
    """Yields a cluster of two servers, so that it is known where the next backup is made."""
    with local_cluster(servers=2, workers=WORKERS, checkpoints=tmp_path_factory.mktemp("checkpoints")) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    with shoal.Client(cluster.address, retry_for_s=60) as client:
        yield client


def plane(name: str, hurry: Path, *, ballast: int = 0, **options: Any) -> shoal.Job:
    """Returns a job whose result depends on every step."""
    settings: dict[str, Any] = {"size": SIZE, "seconds": 0.01, "hurry": str(hurry), "ballast": ballast}
    return shoal.Job(
        "support.programs.recovery:Plane",
        name=name,
        settings=settings,
        workers=WORKERS,
        shards=2,
        epochs=6,
        batch_size=8,
        seed=5,
        checkpoints=shoal.CheckpointPolicy(every_s=0, at_end=False),
        consistency=shoal.Synchronous(),
        optimizer=optim.Adam(0.01),
        **options,
    )


def result_of(client: shoal.Client, spec: shoal.Job) -> Mapping[str, np.ndarray]:
    job = client.submit(spec)
    job.wait(timeout_s=60)
    return job.pull()


def wait_for_copies(job: shoal.JobHandle, copies: int = 2) -> None:
    wait_until(lambda: job.status().copies == copies, timeout_s=60, what=f"{copies} copies")


@pytest.mark.timeout(60 + 40 * RUNS)
def test_the_job_goes_back_to_its_checkpoint_when_both_copies_are_lost(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    expected = result_of(client, plane("calm", tmp_path))
    with run_lengths.count_runs("both_copies_kill", RUNS, "s until all steps are taken") as counted:
        for run in range(RUNS):
            hurry = tmp_path / f"hurry-{run}"
            job = client.submit(plane(f"lost-{run}", hurry, replicas=2))
            wait_until(lambda: job.status().progress.steps >= 10, timeout_s=30, what="some steps")  # noqa: B023
            wait_for_copies(job)
            saved = job.checkpoint(timeout_s=20)
            for number in (0, 1):
                cluster.kill("server", number)
            killed_at = time.monotonic()
            for number in (0, 1):
                cluster.restart("server", number)
            wait_until(lambda: job.status().restarts == 1, what="the way back")  # noqa: B023
            hurry.touch()
            job.wait(timeout_s=60)
            took = time.monotonic() - killed_at
            found = job.pull()
            for name, values in expected.items():
                np.testing.assert_array_equal(found[name], values, f"{name} differs after a restart from {saved}")
            client.drop(job)
            counted.passes(took)


@pytest.mark.timeout(60 + 40 * RUNS)
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_copy_that_is_interrupted_is_made_again(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path, moment: str
) -> None:
    doom, name = tmp_path / "doom", moment.replace(" ", "-")
    with (
        run_lengths.count_runs("kill_during_copy", RUNS, "s until there are two copies again") as counted,
        crashing_server.crashing(cluster, 0, doom),
        exact_training(client, name, shoal.Synchronous(), elements=ELEMENTS) as training,
    ):
        for _ in range(RUNS):
            began = time.monotonic()
            if moment == "cut inputs":
                crashing_server.doom_at(moment, doom)
                wait_until(lambda: not doom.exists(), what="the cut")
            else:
                if moment == "cut copy":
                    crashing_server.doom_at(moment, doom)
                terms = terms_of(client, name)
                cluster.restart("server", 1)
                if moment == "cut copy":
                    wait_until(lambda: not doom.exists(), what="the cut")
                else:
                    # Each group has gone on without its backup, and one begins to get another.
                    wait_until(lambda: max(terms_of(client, name)) >= max(terms) + 2, what="a copy")  # noqa: B023
                    cluster.restart("server", 1)
            training.wait_for_pushes()
            training.wait_for_copies(60)
            assert training.status.restarts == 0
            counted.passes(time.monotonic() - began)


def terms_of(client: shoal.Client, job: str) -> list[int]:
    return [shard.term for shard in placement(client, job).shards]


@run_lengths.long_only
def test_a_job_goes_back_when_the_primary_dies_during_its_only_copy(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    doom, hurry = tmp_path / "doom", tmp_path / "hurry"
    ballast = 2 * ELEMENTS
    expected = result_of(client, plane("calm-copy", tmp_path, ballast=ballast))
    with crashing_server.crashing(cluster, 0, doom) as primary:
        job = client.submit(plane("lost-in-copy", hurry, ballast=ballast, replicas=2))
        wait_until(lambda: job.status().progress.steps >= 2, timeout_s=30, what="some steps")
        wait_for_copies(job)
        job.checkpoint(timeout_s=60)
        crashing_server.doom_at("copy", doom)
        cluster.restart("server", 1)
        primary.wait(30)
        doom.unlink()
    wait_until(lambda: job.status().restarts == 1, timeout_s=40, what="the way back")
    hurry.touch()
    job.wait(timeout_s=60)
    found = job.pull()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values)
    client.drop(job)
