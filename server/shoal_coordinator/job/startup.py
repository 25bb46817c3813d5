"""How one job comes to run: its program is described, its shards are placed and filled, its workers let in. Pure.

It may happen several times in a job's life, for a job that loses its shards begins anew, or goes on from a checkpoint.
"""

from collections.abc import Callable

from shoal import errors
from shoal._wire import Placement
from shoal.status import JobState
from shoal_coordinator.job.checkpoint_coordinator import CheckpointCoordinator
from shoal_coordinator.job.owners import Owners
from shoal_coordinator.job.parts import GroupMember, ProgramDescription, Stage, Submission
from shoal_coordinator.job.recovery import Recovery
from shoal_coordinator.messages import (
    AdmitWorker,
    CreateShards,
    Effect,
    JobDescribed,
    JobRecordKind,
    JoinResult,
    RestoredCheckpoint,
)


class JobStartup:
    """Brings one job from its submission, or from the loss of its shards, to where it runs.

    Args:
        submission: the job.
        owners: of the job; changed by what happens here.
        checkpoint_coordinator: of the job; told what the job goes on from.
        recovery: of the job; says how it goes on from a checkpoint.
        changed: told the name of a record that has changed.
    """

    def __init__(
        self,
        submission: Submission,
        owners: Owners,
        checkpoint_coordinator: CheckpointCoordinator,
        recovery: Recovery,
        changed: Callable[[str], None],
    ) -> None:
        self._ref, self._spec = submission.ref, submission.spec
        self._lifecycle, self._plan = owners.lifecycle, owners.plan
        self._worker_group, self._accounting = owners.worker_group, owners.accounting
        self._checkpoint_coordinator, self._recovery = checkpoint_coordinator, recovery
        self._changed = changed

    def enrol(self, member: GroupMember, now: float) -> None:
        """Gives a worker a part, at a rank that is free."""
        self._worker_group.enrol(member)
        self._lifecycle.reopen()
        state = JobState.STARTING if self._lifecycle.state is JobState.PENDING else self._lifecycle.state
        self._lifecycle.enter(state, f"worker {member.worker} enters as rank {member.rank}", now)

    def describe(self, event: JobDescribed) -> str:
        """Takes what a worker says of its program; how that differs from the first description, if it does.

        Raises:
            InvalidJob: the program has no variables.
        """
        plan, description = self._plan, ProgramDescription(dict(event.variables), event.samples)
        if not description.variables:
            raise errors.InvalidJob(f"the program of job {self._spec.name} has no variables; there is nothing to train")
        if plan.description is None:
            plan.describe(description)
            self._accounting.begin(event.samples)
        elif conflict := plan.description.conflict(description):
            return f"{event.worker} describes the job in another way than its first worker: {conflict}"
        self._worker_group.describe(event.worker)
        self.elect_value_sender()
        self._changed(JobRecordKind.STATE)
        return ""

    def elect_value_sender(self) -> None:
        """Sees to it that the values that the program gives are sent by somebody, if they are needed."""
        if self._plan.lacks_values:
            self._worker_group.elect_value_sender()

    def place(self, placement: Placement, now: float) -> list[Effect]:
        """Has the shards allocated where they are planned."""
        self._plan.place(placement)
        if self._lifecycle.state is not JobState.PLACING:  # or it tries again, of which there is nothing to tell
            self._lifecycle.enter(JobState.PLACING, "", now)
        return [CreateShards(self._ref, placement, self._spec, self._recovery.sources)]

    def shards_created(self, now: float, restored: RestoredCheckpoint | None) -> str:
        """All servers hold the shards, filled; why the job cannot go on from the checkpoint, if it cannot."""
        self._plan.create()
        if restored and (problem := self._resume_from(restored, now)):
            return problem
        self._run_when_ready(now)
        return ""

    def join(self, worker: str, assigned: bool, now: float) -> list[Effect]:
        """Lets a worker in as far as it can go: servers are told of it once they have the shards and it has come."""
        plan, part = self._plan, self._worker_group.active[worker]
        if assigned and part.assignment == self._worker_group.value_sender and not plan.assigned:
            plan.fill()
        if plan.created and part.stage is Stage.ASSIGNED:
            self._worker_group.begin_entry(worker)
            self._changed(JobRecordKind.STATE)
            return [AdmitWorker(self._ref, worker, part.incarnation, part.rank, part.assignment, plan.servers)]
        self._run_when_ready(now)
        return []

    def admitted(self, assignment: int, step: int, now: float) -> None:
        """All servers let a worker in."""
        self._worker_group.admit(assignment, step)
        self._changed(JobRecordKind.STATE)
        self._run_when_ready(now)

    def joined(self, worker: str) -> JoinResult:
        """How far a worker's entry is; of one that has no part in the job, only what became of the job."""
        state, plan, member = self._lifecycle.state, self._plan, self._worker_group.active.get(worker)
        if member is None:
            return JoinResult(state, self._spec)
        ready = self._lifecycle.running and member.stage is Stage.ADMITTED
        assign_values = member.assignment == self._worker_group.value_sender and not plan.assigned
        restored = plan.restored if assign_values else frozenset()
        placement, rank, step = plan.created_placement, member.rank, member.step
        return JoinResult(state, self._spec, ready, placement, rank, step, assign_values, restored)

    def _run_when_ready(self, now: float) -> None:
        plan, placing = self._plan, self._lifecycle.state is JobState.PLACING
        if placing and plan.created and self._worker_group.admitted and not plan.lacks_values:
            self._lifecycle.run(now)

    def _resume_from(self, restored: RestoredCheckpoint, now: float) -> str:
        """Takes up where a checkpoint was; what is wrong with that, if anything is."""
        assert self._plan.description is not None
        resumption = self._recovery.resume(restored, self._plan.description, self._accounting.ledger_changed)
        self._plan.resume_from(resumption.given, assigned=resumption.assigned)
        if resumption.ledger:
            self._accounting.resume_data(resumption.ledger)
        if resumption.problem:
            return resumption.problem
        self._accounting.resume_progress(restored.progress_totals, of_another=not self._lifecycle.started)
        self._checkpoint_coordinator.resume_from(restored.step, now)
        self._lifecycle.note(resumption.note, now)
        return ""
