"""The worker group of one job: its live workers, their ranks, and the ranks that have finished (no I/O)."""

from collections.abc import Iterable, Mapping

from shoal.job import Job
from shoal.v1 import state_pb2
from shoal_coordinator.job.parts import GroupMember, Stage
from shoal_coordinator.messages import WorkerReported


class WorkerGroup:
    """The workers of one job.

    Args:
        spec: the job, as its user submitted it.

    Attributes:
        active: the live members, by worker; empty once the job has ended. Only methods of this class change it.
    """

    def __init__(self, spec: Job) -> None:
        self._spec = spec
        self.active: dict[str, GroupMember] = {}
        self._names: dict[int, str] = {}  # by rank: its worker; kept when the worker finishes or the job ends
        self._finished: set[int] = set()  # ranks that have finished; a session can take one again
        self._value_sender = 0  # assignment of the worker that sends the given values; 0: none

    @property
    def names(self) -> tuple[str, ...]:
        """The current or last worker of each rank, in order of rank."""
        return tuple(self._names[rank] for rank in sorted(self._names))

    @property
    def finished(self) -> int:
        """The number of ranks that have finished."""
        return len(self._finished)

    @property
    def ranks(self) -> dict[str, int]:
        """The ranks of the live workers."""
        return {worker: member.rank for worker, member in self.active.items()}

    @property
    def assignments(self) -> set[int]:
        """The assignments of the live workers."""
        return {member.assignment for member in self.active.values()}

    @property
    def last_reports(self) -> dict[int, WorkerReported]:
        """By assignment, the last report of each live worker that has reported."""
        return {part.assignment: part.last_report for part in self.active.values() if part.last_report}

    @property
    def incarnations(self) -> dict[str, int]:
        """The incarnations of the live workers."""
        return {worker: member.incarnation for worker, member in self.active.items()}

    @property
    def step(self) -> int:
        """The step of the foremost worker, by the workers' reports."""
        return max((member.last_report.step for member in self.active.values() if member.last_report), default=0)

    @property
    def value_sender(self) -> int:
        """The assignment of the worker that sends the given values; 0 if none."""
        return self._value_sender

    @property
    def entering(self) -> bool:
        """Whether servers have been asked to admit any worker."""
        return any(member.stage is not Stage.ASSIGNED for member in self.active.values())

    @property
    def admitted(self) -> bool:
        """Whether enough workers are present for the job to run, and all of them may pull and push."""
        return len(self.active) >= self._spec.fewest_workers and all(
            member.stage is Stage.ADMITTED for member in self.active.values()
        )

    def free(self, ranks: Iterable[int]) -> list[int]:
        """Returns those of the ranks that a worker can take."""
        taken = {member.rank for member in self.active.values()}
        if not self._spec.is_session:
            taken |= self._finished
        return [rank for rank in ranks if rank not in taken]

    def is_finished(self, worker: str) -> bool:
        """Returns whether a worker has finished. Servers have released it, and would not admit it again."""
        return any(self._names.get(rank) == worker for rank in self._finished)

    def has_part(self, worker: str, assignment: int) -> bool:
        """Returns whether a worker has this assignment in the job.

        A session has one assignment in its life, and does not send its number.
        """
        member = self.active.get(worker)
        return member is not None and (self._spec.is_session or member.assignment == assignment)

    def enrol(self, member: GroupMember) -> None:
        """Adds a member at a free rank."""
        self.active[member.worker] = member
        self._names[member.rank] = member.worker

    def begin_entry(self, worker: str) -> None:
        """Records that servers have been asked to admit a worker."""
        self.active[worker].stage = Stage.ENTERING

    def describe(self, worker: str) -> None:
        """Records that a worker has loaded the program, and so has the given values."""
        self.active[worker].described = True

    def admit(self, assignment: int, step: int) -> None:
        """Records that all servers have admitted the worker of an assignment, if it is still present."""
        for member in self.active.values():
            if member.assignment == assignment:
                member.stage, member.step = Stage.ADMITTED, step

    def keep_report(self, report: WorkerReported) -> WorkerReported | None:
        """Keeps a worker's report as its last one; returns the previous one, or None."""
        member = self.active[report.worker]
        earlier, member.last_report = member.last_report, report
        return earlier

    def restore_reports(self, reports: Mapping[int, WorkerReported]) -> None:
        """Restores the last reports of live workers, by assignment."""
        for member in self.active.values():
            member.last_report = reports.get(member.assignment)

    def elect_value_sender(self) -> None:
        """Selects one of the workers that have the given values to send them, if there is any."""
        knowing = [member.assignment for member in self.active.values() if member.described]
        if self._value_sender not in knowing:
            self._value_sender = min(knowing, default=0)

    def release(self, worker: str) -> GroupMember:
        """Removes and returns a member. If the job continues, call `finish` or `vacate` for its rank."""
        return self.active.pop(worker)

    def finish(self, rank: int) -> None:
        """Marks the rank of a released worker as finished."""
        self._finished.add(rank)

    def vacate(self, rank: int) -> None:
        """Frees the rank of a released worker that did not finish."""
        del self._names[rank]

    def clear(self) -> None:
        """Removes all workers, because the job restarts."""
        self.active.clear()
        self._names.clear()
        self._finished.clear()
        self._value_sender = 0

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes the worker group into the job's record."""
        record.parts.extend(member.to_proto() for member in self.active.values())
        record.crew.update(self._names)
        record.finished.extend(sorted(self._finished))
        record.assigner = self._value_sender

    def restore_from(self, record: state_pb2.JobRecord) -> None:
        """Restores the worker group from the job's record."""
        self.active = {part.worker: GroupMember.from_proto(part) for part in record.parts}
        self._names, self._finished = dict(record.crew), set(record.finished)
        self._value_sender = record.assigner

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        ranks = [member.rank for member in self.active.values()]
        assert len(set(ranks)) == len(ranks), "two workers share a rank"
        assert all(0 <= rank < self._spec.most_workers for rank in ranks)
        assert all(self._names[member.rank] == worker for worker, member in self.active.items())
