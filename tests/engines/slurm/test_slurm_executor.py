"""Runs that submitit's executor for Slurm starts, with fake `sbatch`, `srun` and `scontrol` programs.

`sbatch` only takes the script that submitit has written, which the tests then start. Nothing here is Slurm.
"""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from digits import Digits

import shoal
import shoal.slurm
from shoal import errors, optim
from support.slurm.programs import JOB_ID, FakeSlurm
from support.waiting import wait_until

pytest.importorskip("submitit", reason="submitit is not installed: pip install 'shoal[slurm]'")

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
IMAGES, EPOCHS, TASKS = len(Digits().dataset), 30, 3


class Allocation:
    """A run that was submitted to `sbatch`, and its script.

    Args:
        folder: folder for the run and for the programs.
    """

    def __init__(self, folder: Path) -> None:
        self.slurm, self._scripts = FakeSlurm(folder), list[subprocess.Popen[bytes]]()
        job = shoal.Job("digits:Digits", name="digits", epochs=EPOCHS, optimizer=optim.Adam(0.003))
        options: dict[str, Any] = {"slurm_partition": "batch", "cpus_per_task": 1, "timeout_min": 60}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", self.slurm.path)
            self.run = shoal.slurm.submit(
                job, folder=folder / "run", path=ROOT / "examples", cluster="slurm", **options
            )
        self.script: Path = self.run.job.paths.submission_file

    def start(self, *, restarts: int = 0) -> psutil.Process:
        """Starts the script, as Slurm does, and returns the process of `srun`."""
        changes = {"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}
        variables = self.slurm.variables(TASKS, SLURM_CPUS_PER_TASK="1", **changes)
        self._scripts.append(subprocess.Popen(["bash", str(self.script)], env=variables))
        script = psutil.Process(self._scripts[-1].pid)
        wait_until(script.children, what="srun")
        return script.children()[0]

    def end(self) -> None:
        """Waits for the script, which has ended unless a test has failed."""
        for script in self._scripts:
            try:
                script.wait(timeout=30)
            except subprocess.TimeoutExpired:
                for process in psutil.Process(script.pid).children(recursive=True):
                    process.kill()
                script.wait()

    def await_steps(self, steps: int) -> None:
        def taken() -> bool:
            try:
                with self.run.client() as client:
                    return client.job("digits").status().progress.steps >= steps
            except (errors.Unreachable, errors.UnknownJob):
                return False

        wait_until(taken, timeout_s=120, what=f"step {steps}")


@pytest.fixture
def allocation(tmp_path: Path) -> Iterator[Allocation]:
    found = Allocation(tmp_path)
    yield found
    found.end()


def test_a_preempted_run_is_requeued_by_submitit_and_goes_on(allocation: Allocation) -> None:
    srun = allocation.start()
    allocation.await_steps(100)
    srun.send_signal(signal.SIGTERM)
    srun.send_signal(signal.SIGUSR2)
    wait_until(lambda: allocation.slurm.asked, timeout_s=60, what="a requeue")
    assert allocation.slurm.asked == [f"requeue {JOB_ID}"]
    allocation.end()
    saved = allocation.run.checkpoints.show("digits/1")
    allocation.start(restarts=1)
    progress = allocation.run.wait(timeout_s=150).progress
    assert progress.earlier_steps >= saved.step - 1 >= 90
    assert progress.samples == EPOCHS * IMAGES


def test_after_sigterm_alone_task_0_waits_until_slurm_kills_it(allocation: Allocation) -> None:
    """A task that has ended by itself is not requeued."""
    srun = allocation.start()
    allocation.await_steps(100)
    tasks = srun.children()
    srun.send_signal(signal.SIGTERM)
    psutil.wait_procs(tasks[1:], timeout=60)
    assert [task.is_running() for task in tasks] == [True, False, False]
    assert allocation.run.checkpoints.show("digits").step >= 90
    tasks[0].kill()
    allocation.end()
    assert not allocation.slurm.asked


def test_the_script_asks_for_what_a_run_needs(allocation: Allocation) -> None:
    script = allocation.script.read_text()
    for option in ("nodes=1", "ntasks-per-node=3", "cpus-per-task=1", "partition=batch", "signal=USR2@110"):
        assert f"#SBATCH --{option}\n" in script
    srun = next(line for line in script.splitlines() if line.startswith("srun"))
    assert "--kill-on-bad-exit=1 --wait=0 --cpus-per-task=1" in srun
