"""Jobs that lose their shards with one server or with the whole cluster, and continue from their newest checkpoint."""

import json
import random
import re
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import optim
from support import run_lengths
from support.clusters.cluster_probe import placement
from support.clusters.local import local_cluster
from support.faults import crashing_coordinator, crashing_server
from support.scraping import sample
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

KILLS = run_lengths.runs(1, 20)
SIZE, EPOCHS, BATCH, WORKERS = 512, run_lengths.size(3, 6), 8, run_lengths.size(2, 3)
STEPS = SIZE * EPOCHS // (BATCH * WORKERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def cluster(folder: Path) -> Iterator[shoal.LocalCluster]:
    with local_cluster(servers=2, workers=WORKERS, checkpoints=folder) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    with shoal.Client(cluster.address, retry_for_s=60) as client:
        yield client


@pytest.fixture(scope="module")
def unbroken(cluster: shoal.LocalCluster) -> dict[str, np.ndarray]:
    """Returns the variables of a run without faults and without checkpoints."""
    with cluster.client() as client:
        job = client.submit(plane("unbroken", checkpoints=NEVER))
        job.wait(timeout_s=60)
        return job.pull()


NEVER = shoal.CheckpointPolicy(every_s=0, at_end=False)
OFTEN = shoal.CheckpointPolicy(every_s=0, every_steps=STEPS // 8)


def plane(
    name: str, *, seconds: float = 0.0, hurry: str | Path = "", epochs: int = EPOCHS, ballast: int = 0, **options: Any
) -> shoal.Job:
    settings: dict[str, Any] = {"size": SIZE, "seconds": seconds, "hurry": str(hurry), "ballast": ballast}
    options = {
        "workers": WORKERS,
        "shards": 2,
        "checkpoints": OFTEN,
        "consistency": shoal.Synchronous(),
        "optimizer": optim.Adam(0.01),
        **options,
    }
    return shoal.Job(
        "support.programs.recovery:Plane",
        name=name,
        settings=settings,
        batch_size=BATCH,
        epochs=epochs,
        seed=5,
        **options,
    )


def same(found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray]) -> bool:
    return all(np.array_equal(found[name], expected[name]) for name in expected)


def reasons(job: shoal.JobHandle) -> list[str]:
    return [event.reason for event in job.events(follow=False) if isinstance(event, shoal.events.StateChanged)]


def restored_from(job: shoal.JobHandle) -> list[str]:
    return [reason for reason in reasons(job) if reason.startswith("continues from")]


@contextmanager
def running(client: shoal.Client, spec: shoal.Job, steps: int = 1) -> Iterator[shoal.JobHandle]:
    """Yields a job that has taken some steps. Cancels it at the end, also if the test fails."""
    job = client.submit(spec)
    try:
        wait_until(lambda: job.status().progress.steps >= steps, timeout_s=30, what=f"{steps} steps")
        yield job
    except BaseException:
        with suppress(shoal.ShoalError):  # an error here would hide the one that matters
            job.cancel()
        raise
    job.cancel()


def kill_all(cluster: shoal.LocalCluster) -> None:
    """Kills all processes, as a power cut does, and starts them again. A trainer ends with its daemon."""
    for process in cluster.processes:
        process.kill()
    cluster.restart("coordinator")
    members = [process for process in cluster.processes if process.role != "coordinator"]
    with ThreadPoolExecutor(len(members)) as pool:
        list(pool.map(lambda process: cluster.restart(process.role, process.index), members))


@pytest.mark.timeout(60 + 40 * KILLS)
def test_job_has_the_same_result_after_the_whole_cluster_is_killed(
    cluster: shoal.LocalCluster, client: shoal.Client, unbroken: dict[str, np.ndarray], tmp_path: Path
) -> None:
    rng = random.Random(7)
    with run_lengths.count_runs("whole_cluster_kill", KILLS, "s to the end") as counted:
        for run in range(KILLS):
            hurry = tmp_path / f"hurry-{run}"
            # Of all moments: before the first checkpoint, while one is written, between two, near the end.
            moment = rng.randrange(WORKERS * STEPS * 3 // 4)
            with running(client, plane(f"killed-{run}", seconds=0.01, hurry=hurry), moment) as job:
                kill_all(cluster)
                hurry.touch()
                start = time.monotonic()
                job.wait(timeout_s=60)
                took = time.monotonic() - start
                status = job.status()
                assert same(job.pull(), unbroken), f"killed after {moment} pushes, it ended otherwise: {reasons(job)}"
                assert status.restarts or not status.workers
                counted.passes(took)
    print(f"{KILLS} of {KILLS} ended with the same bits, within {counted.worst:.1f} s of the cluster's return")


# Two trainable variables, so that both servers have a part of the norm.
CLIPPED: dict[str, Any] = {"ballast": 2 * SIZE, "optimizer": optim.SGD(0.05, clip_norm=1.0), "epochs": 2}


@pytest.mark.parametrize("moment", run_lengths.size(["send"], crashing_server.MOMENTS))
def test_a_server_dies_while_a_step_waits_for_the_norms(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path, moment: str
) -> None:
    calm = client.submit(plane(f"calm-{moment}", checkpoints=NEVER, **CLIPPED))
    calm.wait(timeout_s=60)
    expected, hurry, doom = calm.pull(), tmp_path / "hurry", tmp_path / "doom"
    spec = plane(f"norms-{moment}", seconds=0.01, hurry=hurry, **CLIPPED)
    with crashing_server.crashing(cluster, 1, doom) as server, running(client, spec) as job:
        assert len({shard.address for shard in placement(client, f"norms-{moment}").shards}) == 2
        saved = job.checkpoint(timeout_s=20)
        crashing_server.doom_at(moment, doom)
        assert server.wait(30) == -signal.SIGKILL
        cluster.restart("server", 1)
        wait_until(lambda: job.status().restarts == 1, what="the job's way back")
        hurry.touch()
        job.wait(timeout_s=60)
        assert same(job.pull(), expected), f"it ended otherwise: {reasons(job)}"
        assert any(f"step {saved.step}" in reason for reason in restored_from(job))


def test_a_worker_dies_while_its_servers_share_norms(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    with running(client, plane("norms-worker", seconds=0.01, hurry=hurry, **CLIPPED), 16) as job:
        cluster.restart("worker", 1)
        hurry.touch()
        job.wait(timeout_s=60)
        assert job.status().restarts == 0
        assert job.pull()["seen"].min() >= CLIPPED["epochs"]


# In the short form, a server dies in the tests of a damaged checkpoint and of the coordinator's death.
@run_lengths.long_only
def test_dead_server_takes_the_job_back_to_its_last_checkpoint(
    cluster: shoal.LocalCluster, client: shoal.Client, unbroken: dict[str, np.ndarray], tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    with running(client, plane("server-dies", seconds=0.01, hurry=hurry)) as job:
        saved = job.checkpoint(timeout_s=20)
        cluster.restart("server", 1)
        wait_until(lambda: job.status().restarts == 1, what="the job's way back")
        hurry.touch()
        job.wait(timeout_s=60)
        assert same(job.pull(), unbroken)
        assert any(f"continues from server-dies/{saved.number}, step {saved.step}" in reason for reason in reasons(job))


def test_a_damaged_checkpoint_is_skipped(
    cluster: shoal.LocalCluster, client: shoal.Client, folder: Path, unbroken: dict[str, np.ndarray], tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    spec = plane("damaged", seconds=0.01, hurry=hurry, checkpoints=shoal.CheckpointPolicy(every_s=0))
    with (
        running(client, spec) as job,
        run_lengths.count_runs("corrupt_checkpoint", 1, "s to the one before") as counted,
    ):
        first, second, third = (job.checkpoint(timeout_s=20) for _ in range(3))
        shard = next((folder / "damaged" / f"{third.number:08}").glob("*.safetensors"))
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
        manifest = folder / "damaged" / f"{second.number:08}" / "manifest.json"
        manifest.write_bytes(manifest.read_bytes()[:-20])
        cluster.restart("server", 0)
        start = time.monotonic()
        wait_until(lambda: restored_from(job), what="the job's way back")
        took = time.monotonic() - start
        hurry.touch()
        job.wait(timeout_s=60)
        assert same(job.pull(), unbroken)
        [went_on] = restored_from(job)
        assert f"continues from damaged/{first.number}, step {first.step}" in went_on
        assert f"damaged/{third.number}: " in went_on
        assert f"damaged/{second.number}: " in went_on
        counted.passes(took)


# One of each in the short form: where what is done and what is known of it are the furthest apart.
SAVING = run_lengths.size(["CheckpointCommitted"], crashing_coordinator.SAVING)
RESTORING = run_lengths.size(["ShardsCreated"], crashing_coordinator.RESTORING)
FAULTS = run_lengths.runs(1, 10)


@pytest.mark.timeout(60 + 20 * FAULTS)
@pytest.mark.parametrize("step", [*SAVING, *RESTORING])
def test_the_coordinator_dies_at_a_step_of_a_checkpoint(
    cluster: shoal.LocalCluster,
    client: shoal.Client,
    folder: Path,
    unbroken: dict[str, np.ndarray],
    tmp_path: Path,
    step: str,
) -> None:
    """The coordinator dies before the step. The next one continues, and the checkpoints that it lists are readable."""
    with run_lengths.count_runs("checkpoint_faults", FAULTS, "s to restore") as counted:
        for run in range(FAULTS):
            hurry, name = tmp_path / f"hurry-{run}", f"{step.lower()}-{run}"
            with running(client, plane(name, seconds=0.01, hurry=hurry)) as job:
                with crashing_coordinator.crashing(cluster, tmp_path / f"doom-{run}") as coordinator:
                    wait_until(lambda: job.status().checkpoint, what="a checkpoint")
                    coordinator.doom(step)
                    if step in crashing_coordinator.RESTORING:
                        cluster.restart("server", run % 2)
                    coordinator.wait(timeout_s=20)
                hurry.touch()
                start = time.monotonic()
                job.wait(timeout_s=60)
                took = time.monotonic() - start
                assert same(job.pull(), unbroken), f"it ended otherwise: {reasons(job)}"
                assert job.status().restarts == (step in crashing_coordinator.RESTORING)
                checkpoints = shoal.Checkpoints(str(folder))
                for checkpoint in checkpoints.list(name):
                    checkpoints.verify(str(checkpoint))
                counted.passes(took)


@pytest.mark.parametrize("step", [*run_lengths.size([], ["CheckpointCommitted"]), *crashing_coordinator.TELLING])
def test_requested_checkpoint_is_reported_after_the_coordinator_dies(
    cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path, step: str
) -> None:
    spec = plane(f"asked-{step.lower()}", seconds=0.01, hurry=tmp_path / "never", checkpoints=NEVER)
    with ThreadPoolExecutor(1) as pool, running(client, spec) as job:
        with crashing_coordinator.crashing(cluster, tmp_path / "doom") as coordinator:
            coordinator.doom(step)
            saved = pool.submit(job.checkpoint, timeout_s=40)
            coordinator.wait(timeout_s=20)
        assert saved.result() == job.status().checkpoint


@run_lengths.long_only
def test_job_without_a_checkpoint_starts_over(
    cluster: shoal.LocalCluster, client: shoal.Client, unbroken: dict[str, np.ndarray], tmp_path: Path
) -> None:
    hurry = tmp_path / "hurry"
    with running(client, plane("early", seconds=0.01, hurry=hurry, checkpoints=NEVER), steps=20) as job:
        cluster.restart("server", 0)
        hurry.touch()
        job.wait(timeout_s=60)
        assert same(job.pull(), unbroken)
        assert any("the job continues from its beginning" in reason for reason in reasons(job))


def test_cancelled_job_continues_in_another(
    client: shoal.Client, unbroken: dict[str, np.ndarray], tmp_path: Path
) -> None:
    with running(client, plane("first-half", seconds=0.01, hurry=tmp_path / "never"), steps=40) as job:
        saved = job.checkpoint(timeout_s=20)
        job.cancel()
    second = client.submit(plane("second-half", restore="first-half"))
    second.wait(timeout_s=60)
    assert same(second.pull(), unbroken)
    found = [re.search(r"continues from first-half/(\d+), step (\d+)", reason) for reason in reasons(second)]
    (number, step) = next((int(it[1]), int(it[2])) for it in found if it)
    assert number >= saved.number  # a periodic one may come before the job is cancelled
    assert step >= saved.step
    assert second.pull()["seen"].sum() == SIZE * EPOCHS


def test_session_starts_from_the_checkpoint_of_another(client: shoal.Client) -> None:
    variables = {"w": shoal.Variable((4,)), "head": shoal.Variable((2,))}
    ones = {"w": np.ones(4, np.float32), "head": np.ones(2, np.float32)}
    options: dict[str, Any] = {"optimizer": optim.SGD(1.0), "checkpoints": NEVER}
    with client.session("loop", variables=variables, **options) as session:
        began = session.pull()
        session.push(ones)
        client.job("loop").checkpoint(timeout_s=20)
        session.push(ones)
    with client.session("again", variables=variables, restore="loop", **options) as session:
        found = session.pull()
        assert session.step == 1
    for name in variables:
        np.testing.assert_array_equal(found[name], began[name] - 1)


@run_lengths.long_only
def test_checkpoint_that_cannot_be_restored_is_refused_with_the_reason(
    client: shoal.Client, unbroken: dict[str, np.ndarray]
) -> None:
    with running(client, plane("whole", checkpoints=shoal.CheckpointPolicy(every_s=0))) as job:
        job.wait(timeout_s=60)
    for choice in ("nobody", "whole/77"):
        with pytest.raises(shoal.UnknownCheckpoint, match=f"there is no checkpoint {choice} in"):
            client.submit(plane("bad", restore=choice))
    other = shoal.Job("support.programs.broken:fine", name="other", restore="whole", optimizer=optim.Adam(0.01))
    with pytest.raises(shoal.JobFailed) as refused:
        client.submit(other).wait(timeout_s=30)
    for name in ("seen", "'w'"):
        assert name in str(refused.value)


@run_lengths.long_only
def test_partial_restore_takes_the_values_of_common_variables(
    client: shoal.Client, unbroken: dict[str, np.ndarray]
) -> None:
    """Fine-tuning: the second program has no variable `seen`, and begins at step 0."""
    with running(client, plane("base", checkpoints=shoal.CheckpointPolicy(every_s=0))) as job:
        job.wait(timeout_s=60)
    tuned = shoal.Job(
        "support.programs.recovery:Tuned",
        name="tuned",
        restore="base",
        partial_restore=True,
        optimizer=optim.SGD(0.0),
    )
    job = client.submit(tuned)
    job.wait(timeout_s=30)
    values = job.pull()
    np.testing.assert_array_equal(values["w"], unbroken["w"])
    np.testing.assert_array_equal(values["head"], [3, 4], err_msg="what its program gives")


def test_failed_storage_does_not_stop_training(
    cluster: shoal.LocalCluster, client: shoal.Client, folder: Path, unbroken: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """At first, a file is in the place of the checkpoint's folder."""
    hurry, blocker = tmp_path / "hurry", folder / "blocked"
    blocker.write_text("in the way")
    with running(client, plane("blocked", seconds=0.01, hurry=hurry, checkpoints=NEVER)) as job:
        with pytest.raises(shoal.StorageFailed, match="could not be"):
            job.checkpoint(timeout_s=20)
        assert "could not be" in job.status().checkpoint_failure
        page = cluster.metrics["coordinator"]
        assert sample(page, "shoal_coordinator_jobs_with_failed_checkpoint") == 1
        blocker.unlink()
        saved = job.checkpoint(timeout_s=20)
        assert job.status().checkpoint == saved
        assert not job.status().checkpoint_failure
        assert sample(page, "shoal_coordinator_jobs_with_failed_checkpoint") == 0
        hurry.touch()
        job.wait(timeout_s=60)
        assert same(job.pull(), unbroken)


@run_lengths.long_only
def test_job_waits_for_missing_storage_before_it_restores(
    cluster: shoal.LocalCluster, client: shoal.Client, folder: Path, unbroken: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """A file takes the place of the job's checkpoints, until the test moves the checkpoints back."""
    hurry, there, away = tmp_path / "hurry", folder / "away", tmp_path / "away"
    with running(client, plane("away", seconds=0.01, hurry=hurry, checkpoints=NEVER)) as job:
        saved = job.checkpoint(timeout_s=20)
        there.rename(away)
        there.write_text("in the way")
        cluster.restart("server", 0)
        told = "waiting for the storage of its checkpoints"
        wait_until(lambda: told in job.status().reason, timeout_s=30, what="the reason why it waits")
        assert "could not be read" in job.status().reason
        there.unlink()
        away.rename(there)
        hurry.touch()
        job.wait(timeout_s=60)
        assert same(job.pull(), unbroken)
        assert restored_from(job) == [f"continues from away/{saved.number}, step {saved.step}"]


def test_old_checkpoints_are_removed(client: shoal.Client, folder: Path, unbroken: dict[str, np.ndarray]) -> None:
    policy = shoal.CheckpointPolicy(every_s=0, keep_last=2, keep_every=3)
    with running(client, plane("kept", seconds=0.01, checkpoints=policy)) as job:
        for _ in range(6):
            job.checkpoint(timeout_s=20)
    assert sorted(path.name for path in (folder / "kept").iterdir()) == ["00000003", "00000005", "00000006"]
    manifest = json.loads((folder / "kept" / "00000006" / "manifest.json").read_text())
    assert manifest["spec"]["name"] == "kept"
    assert manifest["data"]["examples"] == str(SIZE)
