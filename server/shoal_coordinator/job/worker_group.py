"""The roster of one job: the live workers' parts in it, who is at which rank, and who is through. Pure."""

from collections.abc import Iterable, Mapping

from shoal.job import Job
from shoal.v1 import state_pb2
from shoal_coordinator.job.parts import GroupMember, Stage
from shoal_coordinator.messages import WorkerReported


class WorkerGroup:
    """The workers of one job.

    Args:
        spec: the job, as its user asked for it.

    Attributes:
        active: the live workers' parts, by worker; empty once the job has ended. Only methods of this class change it.
    """

    def __init__(self, spec: Job) -> None:
        self._spec = spec
        self.active: dict[str, GroupMember] = {}
        self._names: dict[int, str] = {}  # by rank: who works there, or did until it finished or the job ended
        self._finished: set[int] = set()  # ranks of those that were through; a session's may be taken again
        self._value_sender = 0  # assignment of who sends the values that the program gives; 0: nobody

    @property
    def names(self) -> tuple[str, ...]:
        """Who works there, or did, in the order of ranks."""
        return tuple(self._names[rank] for rank in sorted(self._names))

    @property
    def finished(self) -> int:
        """How many ranks are through."""
        return len(self._finished)

    @property
    def ranks(self) -> dict[str, int]:
        """The live workers' ranks."""
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
        """The live workers' incarnations."""
        return {worker: member.incarnation for worker, member in self.active.items()}

    @property
    def step(self) -> int:
        """The step of the worker that is ahead, as their reports say."""
        return max((member.last_report.step for member in self.active.values() if member.last_report), default=0)

    @property
    def value_sender(self) -> int:
        """The assignment of who sends the values that the program gives; 0: nobody."""
        return self._value_sender

    @property
    def entering(self) -> bool:
        """Whether servers were told of anybody."""
        return any(member.stage is not Stage.ASSIGNED for member in self.active.values())

    @property
    def admitted(self) -> bool:
        """Whether there are enough for the job to run, all of whom may pull and push."""
        return len(self.active) >= self._spec.fewest_workers and all(
            member.stage is Stage.ADMITTED for member in self.active.values()
        )

    def free(self, ranks: Iterable[int]) -> list[int]:
        """Those of some ranks that a worker can take."""
        taken = {member.rank for member in self.active.values()}
        if not self._spec.is_session:
            taken |= self._finished
        return [rank for rank in ranks if rank not in taken]

    def is_finished(self, worker: str) -> bool:
        """Whether a worker has done its part. Servers have let go of it, and would not let it in again."""
        return any(self._names.get(rank) == worker for rank in self._finished)

    def has_part(self, worker: str, assignment: int) -> bool:
        """Whether a worker speaks of the part that it has now, not of one in an earlier job of that name.

        A session has one part in its life, and no number for it.
        """
        member = self.active.get(worker)
        return member is not None and (self._spec.is_session or member.assignment == assignment)

    def enrol(self, member: GroupMember) -> None:
        """A worker has a part, at a rank that is free."""
        self.active[member.worker] = member
        self._names[member.rank] = member.worker

    def begin_entry(self, worker: str) -> None:
        """Servers are told of a worker."""
        self.active[worker].stage = Stage.ENTERING

    def describe(self, worker: str) -> None:
        """A worker has loaded the program, and knows the values that it gives."""
        self.active[worker].described = True

    def admit(self, assignment: int, step: int) -> None:
        """All servers let the worker of this assignment in, if it is still there; it begins at this step."""
        for member in self.active.values():
            if member.assignment == assignment:
                member.stage, member.step = Stage.ADMITTED, step

    def keep_report(self, report: WorkerReported) -> WorkerReported | None:
        """Keeps a worker's report as its last one; returns the one before it, if there was one."""
        member = self.active[report.worker]
        earlier, member.last_report = member.last_report, report
        return earlier

    def restore_reports(self, reports: Mapping[int, WorkerReported]) -> None:
        """Takes up the last reports of live workers, by assignment, which are kept with the job's tally."""
        for member in self.active.values():
            member.last_report = reports.get(member.assignment)

    def elect_value_sender(self) -> None:
        """Sees to it that the given values are to be sent by one of those that know them, if anybody does."""
        knowing = [member.assignment for member in self.active.values() if member.described]
        if self._value_sender not in knowing:
            self._value_sender = min(knowing, default=0)

    def release(self, worker: str) -> GroupMember:
        """A worker has no part any more; that part. `finish` or `vacate` its rank if the job goes on."""
        return self.active.pop(worker)

    def finish(self, rank: int) -> None:
        """Who had this rank, and has no part any more, is through."""
        self._finished.add(rank)

    def vacate(self, rank: int) -> None:
        """Who had this rank, and has no part any more, is gone before it was through."""
        del self._names[rank]

    def clear(self) -> None:
        """The job starts anew: nobody works there, or did."""
        self.active.clear()
        self._names.clear()
        self._finished.clear()
        self._value_sender = 0

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes it down, as part of the job's record."""
        record.parts.extend(member.to_proto() for member in self.active.values())
        record.crew.update(self._names)
        record.finished.extend(sorted(self._finished))
        record.assigner = self._value_sender

    def restore_from(self, record: state_pb2.JobRecord) -> None:
        """Goes on from a record."""
        self.active = {part.worker: GroupMember.from_proto(part) for part in record.parts}
        self._names, self._finished = dict(record.crew), set(record.finished)
        self._value_sender = record.assigner

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        ranks = [member.rank for member in self.active.values()]
        assert len(set(ranks)) == len(ranks), "two workers share a rank"
        assert all(0 <= rank < self._spec.most_workers for rank in ranks)
        assert all(self._names[member.rank] == worker for worker, member in self.active.items())
