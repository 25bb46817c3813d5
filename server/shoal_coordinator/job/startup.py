"""Startup of one job: its program is described, its shards are placed and filled, and its workers enter (no I/O).

A job starts several times if it loses its shards and restarts.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from shoal import errors
from shoal._wire import Placement
from shoal.evaluation_policy import reduces_on_plateau
from shoal.optim import ConstantLR, Schedule
from shoal.status import JobState
from shoal_coordinator.job.checkpoints import CheckpointCoordinator
from shoal_coordinator.job.group_member import GroupMember, Stage
from shoal_coordinator.job.owners import Owners
from shoal_coordinator.job.recovery import Recovery
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.messages import (
    AdmitWorker,
    CreateShards,
    Effect,
    JobDescribed,
    JobRecordKind,
    JoinResult,
    ProgramDescription,
    RestoredCheckpoint,
    SetLearningRate,
)


class JobStartup:
    """Brings one job from its submission, or from a loss of its shards, to the running state.

    Args:
        submission: the job.
        owners: owners of the job's state, which this class changes.
        checkpoint_coordinator: checkpoint coordinator of the job; notified when the job continues from a checkpoint.
        recovery: recovery of the job; decides how the job continues from a checkpoint.
        changed: called with the name of a record that has changed.
    """

    def __init__(
        self,
        submission: Submission,
        owners: Owners,
        checkpoint_coordinator: CheckpointCoordinator,
        recovery: Recovery,
        changed: Callable[[str], None],
    ) -> None:
        self._submission, self._ref, self._spec = submission, submission.ref, submission.spec
        self._lifecycle, self._plan = owners.lifecycle, owners.plan
        self._worker_group, self._accounting = owners.worker_group, owners.accounting
        self._checkpoint_coordinator, self._recovery = checkpoint_coordinator, recovery
        self._changed = changed
        # The learning rate of a checkpoint, between the event that restores it and the effects of that event.
        self._unsent_rate: Schedule | None = None

    def add_worker(self, member: GroupMember, now: float) -> None:
        """Adds a worker to the worker group, at a free rank."""
        self._worker_group.add(member)
        state = JobState.STARTING if self._lifecycle.state is JobState.PENDING else self._lifecycle.state
        self._lifecycle.enter(state, f"worker {member.worker} enters as rank {member.rank}", now)

    def conflict(self, worker: str, description: ProgramDescription) -> str:
        """Returns how a worker's description differs from the first one, and what to do; empty if it does not."""
        first = self._plan.description
        # A worker adds up variables that workers of earlier versions averaged in some modes. It follows the job then.
        conflict = first.conflict(description, sums=not self._spec.is_session) if first else ""
        if not conflict:
            return ""
        advice = (
            "All sessions of a job need the same variables: leave `variables` out to join it, or use another job name"
            if self._spec.is_session
            else "All workers need the same version of the program, and the same data"
        )
        return f"{worker} describes the job differently from its first worker: {conflict}. {advice}"

    def describe(self, event: JobDescribed) -> str:
        """Records a worker's description of the program; returns its `conflict`, or an empty string.

        Raises:
            InvalidJob: the program has no variables, or a group of the optimizer matches none of them.
        """
        plan, description = self._plan, event.description
        if not description.variables:
            problem = (
                f"a session of job {self._spec.name} gives no variables; give at least one array, such as np.zeros(3)"
                if self._spec.is_session
                else f"the program of job {self._spec.name} has no variables; define at least one"
            )
            raise errors.InvalidJob(problem)
        if plan.description is None:
            names = [name for name, it in description.variables.items() if it.trainable]
            if problem := self._spec.optimizer.unmatched(names):
                raise errors.InvalidJob(f"job {self._spec.name}: {problem}")
            plan.describe(description)
            self._accounting.begin(description.samples)
        elif conflict := self.conflict(event.worker, description):
            return conflict
        self._worker_group.describe(event.worker)
        self.elect_value_sender()
        return ""

    def worker_gone(self, now: float) -> None:
        """Selects another value sender if the old one is gone. Begins to run if all remaining workers may train."""
        if not self._worker_group.active:
            self._lifecycle.pause(now)
            self._changed(JobRecordKind.STATE)
        self.elect_value_sender()
        self.run_when_ready(now)

    def elect_value_sender(self) -> None:
        """Selects a worker to send the given values, if they are needed."""
        if self._plan.lacks_values:
            self._worker_group.elect_value_sender()

    def place(self, placement: Placement, now: float) -> list[Effect]:
        """Requests the creation of the shards according to a placement."""
        self._plan.place(placement)
        if self._lifecycle.state is not JobState.PLACING:  # otherwise this is a repeated attempt
            self._lifecycle.enter(JobState.PLACING, "", now)
        spec, rate = self._spec, self._plan.learning_rate
        if rate:
            spec = replace(spec, optimizer=replace(spec.optimizer, learning_rate=rate))
        return [CreateShards(self._ref, placement, spec, self._recovery.sources)]

    def set_learning_rate(self, learning_rate: Schedule) -> list[Effect]:
        """Sets the learning rate of later updates.

        Raises:
            JobEnded: the job has ended.
            InvalidOptimizer: the job reduces its rate on a plateau, and the rate is not constant.
        """
        if self._lifecycle.ended:
            raise errors.JobEnded(
                f"job {self._ref.name} is {self._lifecycle.state.value}; only a live job takes a learning rate"
            )
        if reduces_on_plateau(self._spec.evaluation) and not isinstance(learning_rate, ConstantLR):
            raise errors.InvalidOptimizer(
                f"job {self._ref.name} has reduce_on_plateau, which needs a constant rate, not the schedule "
                f"{learning_rate.name}; give a number"
            )
        self._plan.set_learning_rate(learning_rate)
        servers = self._plan.servers  # without any, the shards will be created with this rate
        return [SetLearningRate(self._ref, learning_rate, servers)] if servers else []

    def shards_created(self, now: float, restored: RestoredCheckpoint | None) -> str:
        """Records that all servers hold filled shards; returns why the job cannot continue, or an empty string."""
        self._plan.create()
        if restored and (problem := self._resume_from(restored, now)):
            return problem
        self.run_when_ready(now)
        return ""

    def join(self, worker: str, assigned: bool, now: float, *, waits: bool = False) -> list[Effect]:
        """Lets a worker enter as far as possible: servers admit it once they hold the shards.

        Args:
            worker: id of the worker.
            assigned: whether it has sent the given values.
            now: seconds of Unix time.
            waits: whether its call waits. The worker is then admitted when the servers hold the shards, without
                another call.

        Returns:
            The effects.
        """
        plan, part = self._plan, self._worker_group.active[worker]
        if assigned and part.assignment == self._worker_group.value_sender and not plan.assigned:
            plan.fill()
        if part.stage is Stage.ASSIGNED and (waits or plan.created):
            self._worker_group.ask_entry(worker)
            return self.admit_waiting()
        self.run_when_ready(now)
        return []

    def admit_waiting(self) -> list[Effect]:
        """Lets the workers enter that have asked for it, if the servers hold the shards."""
        plan = self._plan
        waiting = self._worker_group.waiting if plan.created else []
        for part in waiting:
            self._worker_group.begin_entry(part.worker)
        rate, self._unsent_rate = self._unsent_rate, None
        effects: list[Effect] = [SetLearningRate(self._ref, rate, plan.servers)] if rate else []
        effects += [
            AdmitWorker(self._ref, part.worker, part.incarnation, part.rank, part.assignment, plan.servers)
            for part in waiting
        ]
        return effects

    def answerable(self, workers: Collection[str]) -> list[str]:
        """Returns those of the waiting workers that need not wait any longer.

        A worker need not wait if it may train, if it has no assignment, or if it is the value sender and the servers
        hold the shards. When the job has ended, no worker need wait. See `JoinResult.ends_wait`.
        """
        active = self._worker_group.active
        if self._lifecycle.ended:
            return list(workers)
        running, sender = self._lifecycle.running, 0
        if self._plan.created and not self._plan.assigned:
            sender = self._worker_group.value_sender
        if not running and not sender:  # the usual case, which must be fast: every event leads here
            return [worker for worker in workers if worker not in active]
        parts = {worker: active.get(worker) for worker in workers}
        return [
            worker
            for worker, part in parts.items()
            if part is None or (running and part.stage is Stage.ADMITTED) or (sender and part.assignment == sender)
        ]

    def admitted(self, steps: Mapping[int, int], now: float) -> None:
        """Records that all servers have admitted workers.

        Args:
            steps: by assignment, the step at which its worker starts.
            now: seconds of Unix time.
        """
        self._worker_group.admit(steps, now)
        self._lifecycle.go_on(now)
        self.run_when_ready(now)

    def joined(self, worker: str) -> JoinResult:
        """Returns the state of a worker's entry; only the job's state if the worker has no assignment."""
        state, plan, member = self._lifecycle.state, self._plan, self._worker_group.active.get(worker)
        spec = self._submission.encoded_spec
        if member is None:
            return JoinResult(state, spec)
        ready = self._lifecycle.running and member.stage is Stage.ADMITTED
        assign_values = member.assignment == self._worker_group.value_sender and not plan.assigned
        restored = plan.restored if assign_values else frozenset()
        placement, rank, step = plan.created_placement, member.rank, member.step
        return JoinResult(state, spec, ready, placement, rank, step, assign_values, restored)

    def run_when_ready(self, now: float) -> None:
        """Begins to run, if the shards have their values and copies, and enough workers are present and may train."""
        placing = self._lifecycle.state is JobState.PLACING
        if placing and self._plan.has_values and self._worker_group.admitted and not self.lacks_copies:
            self._lifecycle.run(now)

    @property
    def lacks_copies(self) -> bool:
        """Whether shards have fewer complete copies than the job needs to begin: updates are acknowledged from then."""
        return self._spec.fewest_replicas > 1 and not self._plan.copies.complete

    def _resume_from(self, restored: RestoredCheckpoint, now: float) -> str:
        """Continues from a checkpoint; returns why that is impossible, or an empty string."""
        assert self._plan.description is not None
        resume_plan = self._recovery.resume(restored, self._plan.description, self._changed)
        self._plan.resume_from(resume_plan.given, assigned=resume_plan.assigned)
        if restored.learning_rate and not self._plan.learning_rate:
            self._plan.set_learning_rate(restored.learning_rate)
            self._unsent_rate = restored.learning_rate
        if resume_plan.ledger:
            self._accounting.resume_data(resume_plan.ledger)
        if resume_plan.problem:
            return resume_plan.problem
        of_another = not self._checkpoint_coordinator.checkpoints.saved  # otherwise it continues from its own
        self._accounting.resume_progress(restored.progress_totals, of_another=of_another)
        self._checkpoint_coordinator.resume_from(restored, now)
        self._lifecycle.note(resume_plan.note, now)
        return ""
