"""Task 0: it runs the coordinator, submits the job, waits for its end, and tells the other tasks what to do."""

import hashlib
import os
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

from shoal import errors
from shoal._engines import claim, release
from shoal._system import listed
from shoal._system.logs import Log
from shoal.checkpoint_policy import AUTO
from shoal.checkpoints import Checkpoint, Checkpoints
from shoal.client import Client, JobHandle
from shoal.job import Job
from shoal.slurm._allocation import Allocation
from shoal.slurm._claim import FolderClaim
from shoal.slurm._member_task import POLL_S
from shoal.slurm._options import coordinator_flags, role_environment
from shoal.slurm._role_runner import STOP_S, RoleRunner
from shoal.slurm._run_folder import Announcement, Phase, RunFolder, RunPlan
from shoal.slurm._signals import EndSignals
from shoal.status import JobState, JobStatus, Role
from shoal.v1 import job_pb2

_log = Log(__name__)

# Seconds for which a call is repeated while the coordinator does not answer.
_RETRY_S = 2.0
# Seconds that the other tasks have to leave.
_LEAVE_S = 20.0
# Seconds that servers get beyond `RunPlan.save_timeout_s`.
_MARGIN_S = 10.0
# Seconds from the signal to the end of all tasks, beyond those that servers may take to save: the last 10 s are for a
# busy file system and for the requeue.
END_S = _MARGIN_S + _LEAVE_S + STOP_S + 10.0
# Seconds for which the private folder stays when this process was killed, since the coordinator ends a little later.
_KEPT_S = 5


class CoordinatorTask:
    """The task of the coordinator.

    Args:
        plan: the plan of the run.
        place: the place of the task.
        folder: the folder of the run.
        signals: the signals of this task.
        clock: returns seconds.
    """

    def __init__(
        self,
        plan: RunPlan,
        place: Allocation,
        folder: RunFolder,
        signals: EndSignals,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._plan, self._place, self._folder, self._signals, self._clock = plan, place, folder, signals, clock
        self._said = Announcement(run=place.run, attempt=place.attempt, address="")
        self._handle: JobHandle | None = None
        self._claim: FolderClaim  # of `run`

    def run(self) -> JobStatus | None:
        """Runs the coordinator until the job has ended or a signal comes.

        Returns:
            The status of the job, which has ended; None if a signal came before that.

        Raises:
            StartFailed: a task is missing, or failed.
            JobRunning: another allocation runs this run, or has taken it over.
            ShoalError: the coordinator refused the job.
        """
        with self._folder.claim(self._place) as self._claim, ExitStack() as undo:
            undo.callback(self._announce, Phase.ENDED)
            self._folder.forget_failed_job(self._place.run)  # a user requeues it after a fix
            if ended := self._folder.outcome(self._place.run):  # it was requeued after its end
                return ended
            return self._run_coordinator(self._folder.newest_checkpoint(self._plan))

    def _run_coordinator(self, newest: int) -> JobStatus | None:
        """Runs the coordinator; see `run`. `newest` is the number of the newest checkpoint."""
        with ExitStack() as undo:
            state = self._state_folder()
            undo.callback(release, state)
            coordinator = undo.enter_context(
                RoleRunner(
                    "coordinator",
                    "coordinator",
                    lambda earlier: coordinator_flags(self._plan, self._place, self._folder, str(state), earlier),
                    role_environment("coordinator", os.environ, self._folder, str(state)),
                    start_timeout_s=self._plan.start_timeout_s,
                )
            )
            while not coordinator.address:
                if self._signals.received:
                    self._folder.mark_unfinished(self._place.attempt, newest)
                    return None
                coordinator.poll()
                time.sleep(POLL_S)
            client = undo.enter_context(self._folder.client(coordinator.address, retry_for_s=_RETRY_S))
            self._said = replace(self._said, address=coordinator.address, page=coordinator.page)
            undo.callback(self._end, client)
            self._announce(Phase.RUNNING)
            _log.info("the coordinator runs", address=coordinator.address, page=coordinator.page)
            if ended := self._train(coordinator, client):
                return ended
            # Before the servers save: Slurm may kill this task meanwhile.
            self._folder.mark_unfinished(self._place.attempt, newest)
            self._save(coordinator, client)
            return None

    def _train(self, coordinator: RoleRunner, client: Client) -> JobStatus | None:
        """Submits the job when all members are there, and waits for its end, a failure or a signal."""
        deadline = self._clock() + self._plan.start_timeout_s
        while not self._signals.received:
            coordinator.poll()
            self._claim.check()
            if failures := self._folder.failures(self._place.attempt):
                raise errors.StartFailed(f"a task failed: {' '.join(failures)}")
            with suppress(errors.Unreachable, errors.DeadlineExceeded):
                if self._handle is None:
                    self._submit(client, self._clock() > deadline)
                elif ended := self._ended(self._handle):
                    return ended
                deadline = self._clock() + self._plan.start_timeout_s if self._handle else deadline
            if self._handle and self._clock() > deadline:
                raise errors.Unreachable(
                    f"the coordinator at {coordinator.address} has not answered for {self._plan.start_timeout_s:g} s; "
                    "its log above may say why. Start the run again to go on from its newest checkpoint"
                )
            time.sleep(POLL_S)
        return None

    def _state_folder(self) -> Path:
        """Returns an empty private folder on this node, in place of one that a killed start of the run has left."""
        folder = claim(f"shoal-slurm-{hashlib.sha256(bytes(self._folder.path)).hexdigest()[:16]}", {}, _KEPT_S)
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        return folder

    def _submit(self, client: Client, late: bool) -> None:
        """Submits the job if all members are there. Raises StartFailed if it is too late for those that are missing."""
        there = {member.member for member in client.status().members if member.alive}
        plan = self._plan
        wanted = [f"{role}-{index}" for role in ("server", "worker") for index in range(getattr(plan, f"{role}s"))]
        missing = [name for name in wanted if name not in there]
        if missing and late:
            raise errors.StartFailed(
                f"{listed(missing)} did not join the coordinator within {plan.start_timeout_s:g} s; the logs of their "
                "tasks say why. Nodes must reach each other on all ports, and import Shoal"
            )
        if not missing:
            try:
                self._handle = client.submit(resumed(plan.job, Checkpoints(self._folder.checkpoints(plan))))
            except errors.JobExists:  # the answer to an earlier try was lost: this coordinator has no other job
                self._handle = client.job(plan.job.name)

    def _ended(self, handle: JobHandle) -> JobStatus | None:
        """Returns the status of the job if it has ended, and keeps it in the folder."""
        message = handle._coordinator.call(handle._jobs.Get, job_pb2.GetRequest(job=handle.name)).status
        status = JobStatus.from_proto(message)
        if not status.state.finished:
            return None
        self._folder.end(self._place.run, message)
        return status

    def _save(self, coordinator: RoleRunner, client: Client) -> None:
        """Lets the servers save the job and leave."""
        self._announce(Phase.STOPPING)
        deadline = self._clock() + self._plan.save_timeout_s + _MARGIN_S
        self._await_absence(client, (Role.SERVER,), deadline, coordinator)
        if self._handle is None:
            return
        with suppress(errors.ShoalError):
            status = self._handle.status()
            saved = status.state is not JobState.RUNNING and status.checkpoint is not None
            newest = f"{status.name}/{status.checkpoint.number}" if status.checkpoint else "none"
            step = status.checkpoint.step if status.checkpoint else 0
            _log.info("the allocation ends", saved=saved, checkpoint=newest, step=step)

    def _end(self, client: Client) -> None:
        """Tells the other tasks that the run has ended, and waits until they have left: the coordinator is next."""
        if not self._claim.held:
            return  # the others do not read it
        self._announce(Phase.ENDED)
        self._await_absence(client, (Role.SERVER, Role.WORKER), self._clock() + _LEAVE_S)

    def _await_absence(
        self, client: Client, roles: tuple[Role, ...], deadline: float, coordinator: RoleRunner | None = None
    ) -> None:
        while self._clock() < deadline:
            if coordinator:
                coordinator.poll()
            with suppress(errors.Unreachable, errors.DeadlineExceeded):
                if not any(member.alive and member.role in roles for member in client.status().members):
                    return
            time.sleep(POLL_S)

    def _announce(self, phase: Phase) -> None:
        if self._claim.held and (self._said.phase is not phase or phase is Phase.RUNNING):
            if phase is Phase.ENDED:
                self._claim.end()
            self._said = replace(self._said, phase=phase)
            self._folder.announce(self._said)


def resumed(job: Job, storage: Checkpoints) -> Job:
    """Returns the job as it goes on: from the newest checkpoint of its own name, if there is one."""
    if any(isinstance(found, Checkpoint) for found in storage.list(job.name)):
        return replace(job, restore=AUTO, partial_restore=False)
    return job


__all__ = ["CoordinatorTask", "resumed"]
