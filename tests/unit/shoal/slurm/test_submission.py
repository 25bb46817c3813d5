"""Checks and parameters of a submission, and the end of an allocation that submitit does not notice."""

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal import errors, slurm
from shoal.slurm import _submission
from shoal.slurm._queue import Presence
from shoal.slurm._run_folder import RunFolder, RunPlan
from shoal.slurm._submission import executor_parameters

JOB = shoal.Job("digits:Digits", name="digits", workers=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks_per_node": 2}, r"has 2 tasks, but a coordinator, 1 server and 2 workers need 4: 2 tasks more"),
        ({"nodes": 2, "tasks_per_node": 1}, r"has 2 tasks.* need 4"),
        ({"workers": 1}, "has 1 worker, but the job digits waits for 2"),
        ({"servers": 0}, "servers"),
        ({"path": "missing"}, "path .*missing' is not a folder"),
        ({"flags": {"trainer": ["--x"]}}, "flags has 'trainer'"),
        ({"flags": {"worker": "--x"}}, "flags has 'worker'"),
        ({"start_timeout_s": -1.0}, "start_timeout_s"),
        ({"timeout_min": 0}, "timeout_min"),
        ({"allow_programs": [3]}, "allow_programs"),
        ({"trainer_env": 3}, "trainer_env"),
        ({"checkpoints": "missing"}, "checkpoints .*missing' is not a folder"),
        ({"checkpoints": "nothing://runs"}, "cannot be stored at nothing://runs"),
        ({"checkpoints": 3}, "checkpoints"),
    ],
)
def test_refuses_what_cannot_run(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.BadRequest, match=message):
        slurm.submit(JOB, folder=tmp_path / "run", **{"timeout_min": 10, **arguments})
    assert not (tmp_path / "run").exists()


def test_the_users_options_of_srun_come_after_those_that_a_run_needs() -> None:
    found = executor_parameters({"cpus_per_task": 2, "slurm_srun_args": ["--mpi=none"]}, save_timeout_s=60.0)
    assert found["slurm_srun_args"] == ["--kill-on-bad-exit=1", "--wait=0", "--cpus-per-task=2", "--mpi=none"]
    with pytest.raises(errors.BadRequest, match="slurm_srun_args"):
        executor_parameters({"slurm_srun_args": "--mpi=none"}, save_timeout_s=60.0)


def test_the_signal_comes_in_time_for_the_servers_unless_the_user_says_when() -> None:
    assert executor_parameters({}, save_timeout_s=60.5)["slurm_signal_delay_s"] == 111
    assert executor_parameters({"slurm_signal_delay_s": 30}, save_timeout_s=60.0)["slurm_signal_delay_s"] == 30


class Submitted:
    """A job of submitit, which says all the time whether it is done.

    Without accounting in Slurm, submitit does not notice the end. With it, it takes a preemption for the end.
    """

    job_id, state = "417", "UNKNOWN"

    def __init__(self, folder: Path, done: bool) -> None:
        self.paths, self._done = SimpleNamespace(folder=folder), done

    def done(self) -> bool:
        return self._done


@pytest.mark.parametrize("done", [False, True])
def test_waiting_ends_when_slurm_has_said_for_a_while_that_the_allocation_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, done: bool
) -> None:
    RunFolder(tmp_path / "run").prepare(RunPlan(job=JOB, servers=1, workers=2, path=("/programs",)))
    now, asked = itertools.count(step=10.0), list[str]()
    # It is requeued after its first end.
    states = iter([Presence.RUNNING, Presence.ENDED, Presence.WAITING, *[Presence.ENDED] * 4])

    def presence(job: str) -> Presence:
        asked.append(job)
        return next(states)

    monkeypatch.setattr(_submission, "presence", presence)
    monkeypatch.setattr(_submission, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
    run = slurm.SlurmRun(tmp_path / "run", Submitted(tmp_path, done), "run", in_slurm=True)
    with pytest.raises(errors.JobFailed, match="the allocation 417 ended before the job digits"):
        run.wait()
    assert asked == ["417"] * 6


def test_without_an_answer_of_slurm_submitit_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    RunFolder(tmp_path / "run").prepare(RunPlan(job=JOB, servers=1, workers=2, path=("/programs",)))
    now = itertools.count(step=10.0)
    monkeypatch.setattr(_submission, "presence", lambda _: Presence.UNKNOWN)
    monkeypatch.setattr(_submission, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: None))
    run = slurm.SlurmRun(tmp_path / "run", Submitted(tmp_path, done=True), "run", in_slurm=True)
    with pytest.raises(errors.JobFailed, match="the allocation 417 ended before the job digits"):
        run.wait()
