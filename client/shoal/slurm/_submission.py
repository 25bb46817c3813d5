"""Submission of a run with submitit, and the handle of the run."""

import math
import os
import secrets
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shoal import errors
from shoal._engines import check_flags
from shoal._role.worker_options import program_options, texts
from shoal._system import check_count, check_seconds, check_type, load
from shoal.checkpoints import Checkpoints
from shoal.client import Client
from shoal.job import Job
from shoal.slurm._allocation import check_size
from shoal.slurm._coordinator_task import END_S
from shoal.slurm._queue import Presence, presence
from shoal.slurm._run_folder import Phase, RunFolder, RunPlan
from shoal.slurm._signals import UNFINISHED
from shoal.slurm._task import Unfinished, place_here, run_task
from shoal.status import JobResult

_POLL_S = 0.5
# Seconds between two questions to Slurm, and how long it must say that the allocation has ended: a preempted one can
# look like that before it is requeued, and its outcome can be seen up to a minute later.
_ASK_S, _ENDED_FOR_S = 30.0, 90.0
# How long task 0 waits to be killed after SIGTERM, in seconds: longer than usual grace times of preemption.
_HOLD_S = 600.0


class RunTask:
    """What submitit calls in each task.

    Args:
        folder: the folder of the run.
        run: the id of the submission.
        restarts: how often submitit has requeued it.
    """

    def __init__(self, folder: str, run: str, restarts: int = 0) -> None:
        self._folder, self._run, self._restarts = folder, run, restarts

    def __call__(self) -> None:
        """Runs the role of this task."""
        place = place_here(run=self._run, restarts=self._restarts)
        try:
            run_task(RunFolder(self._folder), place, hold_s=_HOLD_S if place.in_slurm else 0.0)
        except Unfinished as unfinished:
            requeue = signal.getsignal(signal.SIGUSR2)  # submitit's, which calls `checkpoint` and exits
            if unfinished.requeue and callable(requeue):
                requeue(signal.SIGUSR2, None)
            # Not an error, which submitit would keep as the result of a job that Slurm may yet requeue.
            raise SystemExit(UNFINISHED) from None

    def checkpoint(self) -> Any:
        """Returns what submitit should run when the allocation starts again."""
        helpers = load("submitit.helpers", "shoal.slurm.submit", extra="slurm")
        return helpers.DelayedSubmission(RunTask(self._folder, self._run, self._restarts + 1))


class SlurmRun:
    """A run that was submitted. `submit` returns it.

    Args:
        folder: the folder of the run.
        job: the job of submitit, with `job_id`, `state`, `stdout`, `stderr` and `cancel`.
        run: the id of the submission.
        in_slurm: whether Slurm has the job.
    """

    def __init__(self, folder: Path, job: Any, run: str, *, in_slurm: bool = False) -> None:
        self.folder, self.job, self._run, self._files = folder, job, run, RunFolder(folder)
        self._in_slurm, self._asked_at, self._ended_at = in_slurm, -math.inf, math.inf

    @property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the run, which stay when it has ended."""
        return Checkpoints(self._files.checkpoints(self._files.plan(self._run)))

    def client(self) -> Client:
        """Returns a new client of the run's cluster, with the rights of an admin. Close it when it is not needed.

        Raises:
            Unreachable: the coordinator does not run now, or this machine cannot reach it.
        """
        said = self._files.announced()
        if said is None or said.run != self._run or said.phase is Phase.ENDED or not said.address:
            raise errors.Unreachable(
                f"the coordinator of the run in {self.folder} does not run: the allocation {self.job.job_id} is "
                f"{self.job.state}"
            )
        return self._files.client(said.address)

    def wait(self, timeout_s: float | None = None) -> JobResult:
        """Waits until the job has ended, through all requeues, and returns its result.

        Args:
            timeout_s: how long to wait, in seconds. None means no limit. The run continues after a timeout.

        Raises:
            JobFailed: the job failed, or the allocation ended before it. The message says why.
            Cancelled: the job was cancelled.
            DeadlineExceeded: the job has not ended within `timeout_s`.
        """
        deadline = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while True:
            over = self._has_ended()  # before the outcome, which is written first
            try:
                ended = self._files.outcome(self._run)
            except OSError:  # the file server still fails
                ended, over = None, False
            if ended:
                return ended.result()
            if over:
                raise errors.JobFailed(self._unfinished(), job=self._files.plan(self._run).job.name)
            if time.monotonic() >= deadline:
                raise errors.DeadlineExceeded(
                    f"the run in {self.folder} has not ended within {timeout_s:g} s; the allocation "
                    f"{self.job.job_id} is {self.job.state}"
                )
            time.sleep(_POLL_S)

    def cancel(self) -> None:
        """Cancels the allocation. The job can go on from its newest checkpoint: submit it with the same folder."""
        self.job.cancel()

    def _has_ended(self) -> bool:
        """Whether the allocation has ended and will not start again, as far as this machine can know it.

        submitit takes the state of a preempted allocation for its end, and knows states only from sacct. So Slurm's
        queue must have said for a while that the allocation has ended.
        """
        if not self._in_slurm:
            return bool(self.job.done())
        now = time.monotonic()
        if now - self._asked_at >= _ASK_S:
            self._asked_at, found = now, presence(self.job.job_id)
            if found is Presence.ENDED or (found is Presence.UNKNOWN and self.job.done()):
                self._ended_at = min(self._ended_at, now)
            elif found is not Presence.UNKNOWN:
                self._ended_at = math.inf
        return now - self._ended_at >= _ENDED_FOR_S

    def _unfinished(self) -> str:
        name = self._files.plan(self._run).job.name
        reasons = " ".join(self._files.failures(self._run)) or f"Its logs are in {self.job.paths.folder}"
        newest = "it has no checkpoint"
        with suppress(errors.ShoalError):
            newest = f"its newest checkpoint is {self.checkpoints.show(name)}"
        return (
            f"the allocation {self.job.job_id} ended before the job {name}. {reasons}. The job can go on: {newest}, "
            f"and shoal.slurm.submit with the folder {self.folder} starts it again"
        )

    def __repr__(self) -> str:
        return f"SlurmRun({str(self.folder)!r}, {self.job.job_id})"


def submit(
    job: Job,
    *,
    folder: str | os.PathLike[str],
    timeout_min: int,
    servers: int = 1,
    workers: int | None = None,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] = ".",
    allow_programs: str | Sequence[str] = (),
    trainer_env: str | Sequence[str] = (),
    checkpoints: str | os.PathLike[str] = "",
    flags: Mapping[str, Sequence[str]] | None = None,
    nodes: int = 1,
    tasks_per_node: int | None = None,
    start_timeout_s: float = 300.0,
    save_timeout_s: float = 60.0,
    max_num_timeout: int = 3,
    cluster: str | None = None,
    **options: Any,
) -> SlurmRun:
    """Submits a job to Slurm, with a cluster of its own in one allocation. Returns at once.

    If the allocation is preempted or reaches its time limit, the job is saved, and goes on when it is requeued. If it
    is not requeued, call `submit` again with the same folder and the same name of the job.

    Args:
        job: the job. It names a program, and its name names its checkpoints.
        folder: folder of the run, on a file system that all nodes and this machine share. Only you can access it.
        timeout_min: time limit of the allocation, in minutes. Shortly before it, the run is saved and requeued.
        servers: number of servers.
        workers: number of workers. None means that of the job.
        path: folder from which workers import programs, or several of them.
        allow_programs: patterns of the programs that the job may name; see `shoal.LocalCluster`.
        trainer_env: environment variables that programs get; see `shoal.LocalCluster`.
        checkpoints: URL or shared folder for the checkpoints of this run. "" means a folder in that of the run.
        flags: further options by role, such as {"worker": ["--device", "cpu"]}; see `shoal worker --help`. Without
            this one, the tasks of a node take the GPUs that they see in turn.
        nodes: number of nodes.
        tasks_per_node: number of tasks on each node. None means as many as the roles need. Others run further workers.
        start_timeout_s: how long tasks wait for each other, in seconds.
        save_timeout_s: seconds that servers may take to save the job. `slurm_signal_delay_s` is 50 s more by default.
        max_num_timeout: how often submitit requeues the allocation after its time limit.
        cluster: executor of submitit. None means Slurm, if it is here. "local" runs the tasks on this machine.
        options: parameters of the executor, such as mem_gb, cpus_per_task or slurm_partition.

    Raises:
        BadRequest: tasks are missing, an argument is invalid, or the folder has another run or belongs to others.
        JobRunning: an earlier submission with this folder goes on.
        ImportError: submitit is not installed. The message has the command that installs it.
    """
    check_type("job", job, Job, "a shoal.Job, such as shoal.Job('digits:Digits', workers=2)")
    counts = {"servers": servers, "workers": job.workers if workers is None else workers}
    programs = {"path": path, "allow_programs": allow_programs, "trainer_env": trainer_env, "flags": flags}
    times = {"start_timeout_s": start_timeout_s, "save_timeout_s": save_timeout_s}
    plan = make_plan(job, checkpoints=checkpoints, **counts, **programs, **times)
    nodes, roles = check_count("nodes", nodes, 1), 1 + plan.servers + plan.workers
    tasks = check_count("tasks_per_node", tasks_per_node or math.ceil(roles / nodes), 1)
    check_size(nodes * tasks, plan.servers, plan.workers)
    size = {"nodes": nodes, "tasks_per_node": tasks, "timeout_min": check_count("timeout_min", timeout_min, 1)}
    return _submit(RunFolder(folder), plan, cluster, max_num_timeout, {"name": job.name} | size | options)


def _submit(
    files: RunFolder, plan: RunPlan, cluster: str | None, max_num_timeout: int, options: Mapping[str, Any]
) -> SlurmRun:
    """Writes a plan to the folder of a run, and submits the run to an executor; see `submit`."""
    open_executor = load("submitit", "shoal.slurm.submit", extra="slurm").AutoExecutor
    files.refuse_second()
    run = secrets.token_hex(4)
    files.prepare(plan, run)
    limits = {f"{name}_max_num_timeout": max_num_timeout for name in ("slurm", "local")}
    executor = open_executor(files.submitit, cluster=cluster, **limits)
    executor.update_parameters(**executor_parameters(options, plan.save_timeout_s))
    submitted = executor.submit(RunTask(str(files.path), run))
    return SlurmRun(files.path, submitted, run, in_slurm=executor.cluster == "slurm")


def make_plan(
    job: Job, *, path: Any, allow_programs: Any, trainer_env: Any, checkpoints: Any, flags: Any, **wanted: Any
) -> RunPlan:
    """Returns the plan of a run.

    Args:
        job: the job.
        path: folder from which workers import programs, or several of them.
        allow_programs: patterns of the programs that the job may name.
        trainer_env: environment variables that programs get.
        checkpoints: URL of the checkpoint storage, or a folder; empty for the folder of the run.
        flags: further options by role; None means none.
        wanted: the other attributes of the plan.

    Raises:
        BadRequest: an argument is invalid.
    """
    for name in ("start_timeout_s", "save_timeout_s"):
        check_seconds(name, wanted[name])
        if wanted[name] <= 0:
            raise errors.BadRequest(f"{name} is {wanted[name]:g}; give a number of seconds above 0")
    for name in ("servers", "workers"):
        check_count(name, wanted[name], 1)
    made = check_flags(flags)
    made["worker"] = [*program_options(allow_programs, trainer_env), *made.get("worker", ())]
    return RunPlan(job=job, path=_existing("path", path), checkpoints=_storage(checkpoints), flags=made, **wanted)


def _storage(given: Any) -> str:
    """Returns the URL of a storage, with an absolute path. Raises BadRequest if Shoal cannot use it."""
    check_type("checkpoints", given, (str, os.PathLike), "a folder or a URL, such as 's3://bucket/runs'")
    url = str(os.fspath(given))
    if "://" in url:
        return Checkpoints(url).url
    return _existing("checkpoints", url)[0] if url else ""


def executor_parameters(options: Mapping[str, Any], save_timeout_s: float) -> dict[str, Any]:
    """Returns the parameters of an executor, with what a run needs. The user's options come last, so they win."""
    # A task that is killed ends the allocation, which Slurm can then start again. Otherwise the others would wait. One
    # that has left does not: a site can let srun kill the others some time after the first end.
    needed = ["--kill-on-bad-exit=1", "--wait=0"]
    if "cpus_per_task" in options:  # srun does not take it from sbatch
        needed.append(f"--cpus-per-task={options['cpus_per_task']}")
    given = options.get("slurm_srun_args") or []
    check_type("slurm_srun_args", given, list, "a list of options, such as ['--mpi=none']")
    delay_s = math.ceil(save_timeout_s + END_S)
    return {"slurm_signal_delay_s": delay_s, **options, "slurm_srun_args": [*needed, *given]}


def _existing(name: str, given: Any) -> tuple[str, ...]:
    """Returns the absolute paths of one or several folders. Raises BadRequest if one of them is not a folder."""
    paths = texts(name, given, "a folder, such as 'examples', or a list of them", (str, os.PathLike))
    found = [Path(each).expanduser().absolute() for each in paths]
    for folder in found:
        if not folder.is_dir():
            raise errors.BadRequest(f"{name} {str(folder)!r} is not a folder; create it, or name another one")
    return tuple(map(str, found))


__all__ = ["RunTask", "SlurmRun", "executor_parameters", "make_plan", "submit"]
