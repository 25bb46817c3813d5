"""The body of each task of an allocation: the role that its rank gives."""

import os
import signal
import time
from contextlib import suppress

from shoal import errors
from shoal._role.logs import configure_logging
from shoal.slurm._allocation import Allocation, check_size, role_of
from shoal.slurm._coordinator_task import CoordinatorTask
from shoal.slurm._member_task import POLL_S, MemberTask
from shoal.slurm._run_folder import RunFolder
from shoal.slurm._signals import EndSignals


class Unfinished(Exception):
    """The allocation ends before the job. The next start of the tasks goes on.

    Attributes:
        requeue: whether SIGUSR2 came, with which submitit asks to be requeued.
    """

    def __init__(self, *, requeue: bool) -> None:
        super().__init__("the allocation ends before the job; start the run again to go on")
        self.requeue = requeue


def run_task(folder: RunFolder, place: Allocation, *, hold_s: float = 0.0) -> None:
    """Runs the role of a task until the job has ended.

    Args:
        folder: the folder of the run.
        place: the place of the task.
        hold_s: how long task 0 waits for SIGUSR2 after the job is saved, if SIGTERM came alone, in seconds. Slurm
            requeues a preempted job that it had to kill, and not one that has ended.

    Raises:
        Unfinished: task 0 received a signal before the job ended.
        JobRunning: another allocation has the folder.
        JobFailed, Cancelled: the job failed or was cancelled. Only task 0 raises it.
        BadRequest: the allocation is too small, or the folder has no run.
        StartFailed: a task is missing, or failed.
    """
    role, index = "task", place.rank
    with EndSignals() as signals:
        try:
            plan = folder.plan(place.run)
            check_size(place.tasks, plan.servers, plan.workers)
            role, index = role_of(place.rank, plan.servers)
            configure_logging("console", "info", task=str(place.rank), role=role)
            if role != "coordinator":
                MemberTask(role, index, plan, place, folder, signals).run()
                return
            ended = CoordinatorTask(plan, place, folder, signals).run()
        except errors.ShoalError as error:
            with suppress(OSError):  # a folder that this node does not have
                if not folder.failures(place.attempt):  # the others end because of the first one
                    folder.report_failure(place.attempt, f"{role}-{index}", error.message)
            raise
        if ended is None:
            _hold(signals, hold_s)
            raise Unfinished(requeue=signal.SIGUSR2 in signals.received)
    ended.result()


def run_helper(folder: RunFolder, place: Allocation) -> None:
    """Runs a further worker, in an allocation of its own, until the run ends or this allocation does.

    Raises:
        StartFailed: no coordinator of the run was found.
        BadRequest: the folder has no run.
    """
    configure_logging("console", "info", task=str(place.rank), role="worker")
    with EndSignals() as signals:
        name = f"worker-{place.run}-{place.step}-{place.rank}"  # a job can have several steps of workers
        MemberTask("worker", place.rank, folder.plan(), place, folder, signals, helper=name).run()


def _hold(signals: EndSignals, hold_s: float) -> None:
    deadline = time.monotonic() + hold_s
    while signal.SIGUSR2 not in signals.received and time.monotonic() < deadline:
        time.sleep(POLL_S)


def place_here(*, run: str = "", restarts: int = 0) -> Allocation:
    """Returns the place of this process; see `Allocation.find`."""
    return Allocation.find(os.environ, run=run, restarts=restarts)


__all__ = ["Unfinished", "place_here", "run_helper", "run_task"]
