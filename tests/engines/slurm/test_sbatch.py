"""The recipe for sbatch, with fake `srun` and `scontrol` programs: nothing here is Slurm, or needs submitit.

The node of the tasks has a name, so the roles listen on all interfaces, with TLS.
"""

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from digits import Digits

import shoal
from shoal import errors
from shoal._security import Credentials
from shoal.slurm._coordinator_task import END_S
from shoal.slurm._run_folder import RunFolder
from support.clusters.given_access import check_colleagues_get_access
from support.slurm.programs import FakeSlurm
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
RECIPE = ROOT / "deploy" / "slurm" / "shoal.sbatch"
IMAGES, BATCH_SIZE = len(Digits().dataset), 32
JOB = ["digits:Digits", "--name", "digits", "--workers", "1", "--max-workers", "2"]
JOB += ["--optimizer", "adam:learning_rate=0.003"]


class Batch:
    """The recipe as a process, as Slurm runs it on the first node.

    Args:
        folder: folder for the fake programs of Slurm, and for the log.
        tasks: number of tasks of the allocation.
    """

    def __init__(self, folder: Path, tasks: int) -> None:
        self.run, self._tasks, self._log = RunFolder(folder / "run"), tasks, folder / "shoal.log"
        self.slurm = FakeSlurm(folder)

    @property
    def log(self) -> str:
        return self._log.read_text()

    def variables(self, **changes: str) -> dict[str, str]:
        return self.slurm.variables(self._tasks, **changes)

    def start(self, *, epochs: int, restarts: int = 0) -> "subprocess.Popen[bytes]":
        arguments = [str(self.run.path), "--path", str(ROOT / "examples"), *JOB, "--epochs", str(epochs)]
        with self._log.open("ab") as log:
            return subprocess.Popen(
                ["bash", str(RECIPE), *arguments],
                env=self.variables(SLURM_RESTART_COUNT=str(restarts)),
                stdout=log,
                stderr=log,
            )

    def await_steps(self, steps: int) -> None:
        def taken() -> bool:
            said = self.run.announced()
            if said is None or not said.address:
                return False
            try:
                with self.run.client(said.address) as client:
                    return client.job("digits").status().progress.steps >= steps
            except errors.UnknownJob:
                return False

        wait_until(taken, timeout_s=120, what=f"step {steps}")


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[Batch]:
    yield Batch(tmp_path, tasks=3)
    for script in psutil.Process().children():  # of a test that has failed
        with suppress(psutil.NoSuchProcess):  # also of one that has ended
            if "shoal.sbatch" in " ".join(script.cmdline()):
                for process in [*script.children(recursive=True), script]:
                    process.kill()


def srun(script: "subprocess.Popen[bytes]") -> psutil.Process:
    return next(it for it in psutil.Process(script.pid).children() if "fake_srun.py" in " ".join(it.cmdline()))


def test_the_recipe_trains_is_requeued_and_goes_on(batch: Batch, tmp_path: Path) -> None:
    script = batch.start(epochs=100_000)
    batch.await_steps(100)
    check_access(batch.run, tmp_path)
    check_the_variables_of_the_cluster(batch.run)
    check_a_worker_of_another_allocation_joins(batch)
    srun(script).send_signal(signal.SIGUSR2)  # before the time limit
    assert script.wait(timeout=60) == 75, batch.log
    assert batch.slurm.asked == ["requeue 417"]
    saved = shoal.Checkpoints(batch.run.checkpoints(batch.run.plan())).show("digits/1")
    assert saved.step >= 50

    epochs = 2 * saved.step * BATCH_SIZE // IMAGES + 20  # more than it has trained with one or two workers
    assert batch.start(epochs=epochs, restarts=1).wait(timeout=150) == 0, batch.log
    outcome = batch.run.outcome("417")
    assert outcome is not None
    progress = outcome.result().progress
    assert progress.earlier_steps >= saved.step - 1
    assert progress.samples == epochs * IMAGES
    assert batch.slurm.asked == ["requeue 417"]
    params = shoal.Checkpoints(batch.run.checkpoints(batch.run.plan())).read("digits")
    assert shoal.evaluate(Digits(), params)["accuracy"] >= 0.97


def check_access(run: RunFolder, folder: Path) -> None:
    """The roles listen on all interfaces. Nobody connects without a certificate of the run."""
    said = run.announced()
    assert said is not None
    assert said.address.startswith("localhost:")
    check_colleagues_get_access(said.address, run.tls("admin"), folder)
    with run.client(said.address) as client:
        members = {member.member: member for member in client.status().members}
    assert members["server-0"].address.startswith("localhost:")
    assert members["server-0"].zone == "localhost"  # the node
    authority = Credentials.find(environment={"SHOAL_TLS_CA": run.tls("admin")["SHOAL_TLS_CA"]})
    for credentials in (Credentials(), authority):
        stranger = shoal.Client(said.address, retry_for_s=0.0, credentials=credentials)
        with closing(stranger), pytest.raises(errors.Unauthenticated):
            stranger.status()


def check_the_variables_of_the_cluster(run: RunFolder) -> None:
    module = f"{shlex.quote(sys.executable)} -m shoal"
    script = f'eval "$({module}.slurm env --folder {run.path})" && {module} jobs'
    listed = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert "digits" in listed.stdout


def check_a_worker_of_another_allocation_joins(batch: Batch) -> None:
    said = batch.run.announced()
    assert said is not None
    helper = subprocess.Popen(
        [sys.executable, "-m", "shoal.slurm", "workers", "--folder", str(batch.run.path)],
        env=batch.variables(SLURM_JOB_ID="500", SLURM_PROCID="0", SLURM_NTASKS="1", SLURMD_NODENAME="localhost"),
    )
    with batch.run.client(said.address) as client:
        wait_until(
            lambda: "worker-500-0-0" in client.job("digits").status().workers, timeout_s=60, what="a second worker"
        )
        helper.send_signal(signal.SIGTERM)
        assert helper.wait(timeout=60) == 0
        assert client.job("digits").status().state is shoal.JobState.RUNNING


def test_too_few_tasks_end_at_once_and_say_what_is_missing(tmp_path: Path) -> None:
    batch = Batch(tmp_path, tasks=2)
    assert batch.start(epochs=1).wait(timeout=60) not in (0, 75)
    assert "has 2 tasks, but a coordinator, 1 server and 1 worker need 3: 1 task more" in batch.log
    assert "--ntasks=3" in batch.log
    assert not batch.slurm.asked


def test_a_run_is_requeued_though_a_task_was_slow_and_killed(batch: Batch) -> None:
    """srun then returns the status of the killed task, not that of task 0."""
    batch.slurm.replace("srun", f"echo 0 > {batch.run.path}/unfinished/417.$SLURM_RESTART_COUNT.0.0\nexit 137")
    for restarts in range(3):
        assert batch.start(epochs=1, restarts=restarts).wait(timeout=60) == 137
    assert batch.slurm.asked == ["requeue 417"] * 2
    assert "3 allocations in a row ended without a new checkpoint" in batch.log
    batch.slurm.replace("srun", "exit 137")
    assert batch.start(epochs=1, restarts=3).wait(timeout=60) == 137
    assert len(batch.slurm.asked) == 2
    assert "its tasks were not asked to end, so one has failed" in batch.log


def test_a_task_without_a_coordinator_ends_and_says_where_it_looked(batch: Batch) -> None:
    module = [sys.executable, "-m", "shoal.slurm"]
    prepare = [*module, "prepare", "--folder", str(batch.run.path), "--path", str(ROOT / "examples"), *JOB]
    subprocess.run([*prepare, "--start-timeout", "1"], check=True)
    ended = subprocess.run(
        [*module, "task", "--folder", str(batch.run.path)],
        env=batch.variables(SLURM_PROCID="1", SLURM_JOB_NODELIST="gpu[07-08]"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 3
    assert "server-0 found no coordinator within 1 s: task 0, on the node gpu07, has not written" in ended.stderr


def test_the_recipe_asks_slurm_for_what_the_run_needs() -> None:
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2]
        for line in RECIPE.read_text().splitlines()
        if line.startswith("#SBATCH")
    )
    assert options["signal"].startswith("USR2@")
    assert int(options["signal"].removeprefix("USR2@")) >= 60 + END_S  # what servers may take to save, and an end
    assert options["open-mode"] == "append"
    assert "requeue" in options
