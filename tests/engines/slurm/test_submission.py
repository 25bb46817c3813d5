"""Runs that submitit's local executor starts: training, a requeue, an early end, and errors. Nothing here is Slurm.

The executor starts all tasks on this machine. Slurm sends a signal to each task, so the tests do the same.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from digits import Digits

import shoal
import shoal.slurm
from shoal import errors, optim
from shoal._security import Credentials
from support import run_lengths
from support.clusters.local import QUICK
from support.waiting import wait_until

pytest.importorskip("submitit", reason="submitit is not installed: pip install 'shoal[slurm]'")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
IMAGES, BATCH_SIZE, EPOCHS = len(Digits().dataset), 32, 30
SAMPLES = EPOCHS * IMAGES
RUNS: list[shoal.slurm.SlurmRun] = []  # that have not been looked after yet


def digits(**changes: Any) -> shoal.Job:
    fields: dict[str, Any] = {"name": "digits", "workers": 2, "epochs": EPOCHS, "optimizer": optim.Adam(0.003)}
    return shoal.Job("digits:Digits", **(fields | changes))


def submit(job: shoal.Job, folder: Path, **options: Any) -> shoal.slurm.SlurmRun:
    given: dict[str, Any] = {"servers": 2, "path": ROOT / "examples", "cluster": "local", "timeout_min": 20}
    RUNS.append(shoal.slurm.submit(job, folder=folder, **{**given, "flags": QUICK, **options}))
    return RUNS[-1]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Kills what a failed test leaves: the roles end with their tasks."""
    yield
    while RUNS:
        run = RUNS.pop()
        if not run.job.done():
            for process in [psutil.Process(int(run.job.job_id)), *tasks(run)]:
                process.kill()
            run.job.wait()


def tasks(run: shoal.slurm.SlurmRun) -> list[psutil.Process]:
    return psutil.Process(int(run.job.job_id)).children()


def signal_tasks(run: shoal.slurm.SlurmRun, number: signal.Signals) -> None:
    for task in tasks(run):
        task.send_signal(number)


def await_steps(run: shoal.slurm.SlurmRun, steps: int) -> None:
    """Returns when the job has taken so many steps. Until then the coordinator may not run, or not know the job."""

    def taken() -> bool:
        try:
            with run.client() as client:
                return client.job("digits").status().progress.steps >= steps
        except (errors.Unreachable, errors.UnknownJob):
            return False

    wait_until(taken, timeout_s=120, what=f"step {steps}")


def log(run: shoal.slurm.SlurmRun) -> str:
    return str(run.job.task(0).stderr() or "")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slurm") / "run"


@pytest.fixture(scope="module")
def requeued(folder: Path) -> shoal.slurm.SlurmRun:
    """A run that was requeued in the middle of its training, and has ended."""
    run = submit(digits(epochs=2 * EPOCHS), folder)
    await_steps(run, 100)
    signal_tasks(run, signal.SIGUSR2)
    run.wait(timeout_s=200)
    run.job.wait()
    return run


def test_digits_train(requeued: shoal.slurm.SlurmRun) -> None:
    assert shoal.evaluate(Digits(), requeued.checkpoints.read("digits"))["accuracy"] >= 0.97
    assert requeued.job.results() == [None] * 5  # each task ended without an error


def test_a_requeue_goes_on_from_the_checkpoint(requeued: shoal.slurm.SlurmRun) -> None:
    progress = requeued.wait().progress
    first = requeued.checkpoints.show("digits/1")
    assert first.step >= 50  # of each of two workers
    assert progress.earlier_steps >= 2 * (first.step - 1)
    assert progress.lost_steps == 0
    assert progress.samples == progress.total_samples == 2 * SAMPLES
    assert log(requeued).count("the coordinator runs") == 2
    assert "checkpoint=digits/1" in log(requeued)
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("shoal-slurm-*"))


def test_a_further_start_of_a_run_that_has_ended_ends_at_once(requeued: shoal.slurm.SlurmRun) -> None:
    assert requeued.wait(timeout_s=0.0).progress.samples == 2 * SAMPLES
    with pytest.raises(errors.Unreachable, match="does not run"):
        requeued.client()


def test_a_run_that_ends_early_goes_on_with_the_same_folder(tmp_path: Path) -> None:
    run = submit(digits(epochs=100_000), tmp_path / "run")
    await_steps(run, 100)
    check_strangers_are_refused(run)
    check_second_allocation_is_refused(run)
    signal_tasks(run, signal.SIGTERM)
    with pytest.raises(
        errors.JobFailed, match=r"ended before the job digits.*newest checkpoint is digits/1.*submit with"
    ):
        run.wait(timeout_s=60)
    step = run.checkpoints.show("digits").step
    epochs = 2 * step * BATCH_SIZE // IMAGES + 5
    again = submit(digits(epochs=epochs), tmp_path / "run")
    progress = again.wait(timeout_s=120).progress
    assert progress.earlier_steps >= 2 * (step - 1)
    assert progress.samples == epochs * IMAGES
    again.job.wait()


def check_strangers_are_refused(run: shoal.slurm.SlurmRun) -> None:
    """Nobody connects without a certificate of the run, though this user may read the folder."""
    with run.client() as insider:
        address, members = insider.address, insider.status().members
    authority = Credentials.find(environment={"SHOAL_TLS_CA": str(run.folder / "certificates" / "ca.pem")})
    for credentials in (Credentials(), authority):
        stranger = shoal.Client(address, retry_for_s=0.0, credentials=credentials)
        with closing(stranger), pytest.raises(errors.ShoalError) as refused:
            stranger.status()
        assert isinstance(refused.value, errors.Unauthenticated | errors.Unreachable)
    assert {member.member for member in members} == {"server-0", "server-1", "worker-0", "worker-1"}
    assert all(member.address.startswith("127.0.0.1:") for member in members if member.address)


def check_second_allocation_is_refused(run: shoal.slurm.SlurmRun) -> None:
    ended = start_task(run.folder, rank=0, tasks=5, job="second").communicate(timeout=60)
    assert "goes on in another allocation" in ended[1]
    with pytest.raises(errors.JobRunning, match="goes on in another allocation"):
        submit(digits(), run.folder)
    with run.client() as client:
        assert client.job("digits").status().state is shoal.JobState.RUNNING


def start_task(folder: Path, *, rank: int, tasks: int, job: str) -> "subprocess.Popen[str]":
    """Starts one task as srun does."""
    variables = {"SLURM_JOB_ID": job, "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(tasks)}
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.slurm", "task", "--folder", str(folder)],
        env={**os.environ, **variables},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_job_that_fails_ends_all_tasks_with_its_reason(tmp_path: Path) -> None:
    program = tmp_path / "broken_program.py"
    program.write_text("import shoal\n\n\ndef broken() -> shoal.Program:\n    raise ValueError('no such data')\n")
    job = shoal.Job("broken_program:broken", name="broken")
    run = submit(job, tmp_path / "run", servers=1, path=tmp_path)
    with pytest.raises(errors.JobFailed, match="no such data"):
        run.wait(timeout_s=100)
    run.job.wait()
    assert "no such data" in str(run.job.task(0).exception())
    assert [run.job.task(index).exception() for index in (1, 2)] == [None, None]


def test_a_role_that_is_killed_is_started_again(tmp_path: Path) -> None:
    run = submit(digits(checkpoints=shoal.CheckpointPolicy(every_steps=50)), tmp_path / "run", servers=1)
    await_steps(run, 120)
    for process in tasks(run)[:2]:
        (role,) = process.children()
        role.kill()
    progress = run.wait(timeout_s=150).progress
    run.job.wait()
    assert progress.samples == SAMPLES
    for task, name in enumerate(("coordinator", "server-0")):
        assert f"{name} ended and is started again" in str(run.job.task(task).stderr())


@run_lengths.long_only  # the role dies five times, after growing pauses
def test_a_task_that_cannot_go_on_ends_the_run(tmp_path: Path) -> None:
    run = submit(digits(), tmp_path / "run", servers=1, flags={"worker": ["--device", "quantum"]})
    with pytest.raises(errors.JobFailed, match=r"worker-\d ended with exit status \d.*is not started again"):
        run.wait(timeout_s=150)
    run.job.wait()
