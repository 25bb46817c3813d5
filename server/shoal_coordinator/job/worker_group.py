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
        self._assigner = 0  # assignment of who sends the values that the program gives; 0: nobody

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
        return {worker: participant.rank for worker, participant in self.active.items()}

    @property
    def assignments(self) -> set[int]:
        """The assignments of the live workers."""
        return {participant.assignment for participant in self.active.values()}

    @property
    def told(self) -> dict[int, WorkerReported]:
        """By assignment, the last report of each live worker that has reported."""
        return {part.assignment: part.told for part in self.active.values() if part.told}

    @property
    def incarnations(self) -> dict[str, int]:
        """The live workers' incarnations."""
        return {worker: participant.incarnation for worker, participant in self.active.items()}

    @property
    def step(self) -> int:
        """The step of the worker that is ahead, as their reports say."""
        return max((participant.told.step for participant in self.active.values() if participant.told), default=0)

    @property
    def assigner(self) -> int:
        """The assignment of who sends the values that the program gives; 0: nobody."""
        return self._assigner

    @property
    def entering(self) -> bool:
        """Whether servers were told of anybody."""
        return any(participant.stage is not Stage.ASSIGNED for participant in self.active.values())

    @property
    def admitted(self) -> bool:
        """Whether there are enough for the job to run, all of whom may pull and push."""
        return len(self.active) >= self._spec.fewest_workers and all(
            participant.stage is Stage.ADMITTED for participant in self.active.values()
        )

    def free(self, ranks: Iterable[int]) -> list[int]:
        """Those of some ranks that a worker can take."""
        taken = {participant.rank for participant in self.active.values()}
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
        participant = self.active.get(worker)
        return participant is not None and (self._spec.is_session or participant.assignment == assignment)

    def enrol(self, participant: GroupMember) -> None:
        """A worker has a part, at a rank that is free."""
        self.active[participant.worker] = participant
        self._names[participant.rank] = participant.worker

    def let_in(self, worker: str) -> None:
        """Servers are told of a worker."""
        self.active[worker].stage = Stage.ENTERING

    def describe(self, worker: str) -> None:
        """A worker has loaded the program, and knows the values that it gives."""
        self.active[worker].described = True

    def admit(self, assignment: int, step: int) -> None:
        """All servers let the worker of this assignment in, if it is still there; it begins at this step."""
        for participant in self.active.values():
            if participant.assignment == assignment:
                participant.stage, participant.step = Stage.ADMITTED, step

    def hear(self, report: WorkerReported) -> WorkerReported | None:
        """Keeps a worker's report as its last one; returns the one before it, if there was one."""
        participant = self.active[report.worker]
        earlier, participant.told = participant.told, report
        return earlier

    def recall(self, told: Mapping[int, WorkerReported]) -> None:
        """Takes up the last reports of live workers, by assignment, which are kept with the job's tally."""
        for participant in self.active.values():
            participant.told = told.get(participant.assignment)

    def elect_assigner(self) -> None:
        """Sees to it that the given values are to be sent by one of those that know them, if anybody does."""
        knowing = [participant.assignment for participant in self.active.values() if participant.described]
        if self._assigner not in knowing:
            self._assigner = min(knowing, default=0)

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
        self._assigner = 0

    def write_to(self, record: state_pb2.JobRecord) -> None:
        """Writes it down, as part of the job's record."""
        record.parts.extend(participant.to_proto() for participant in self.active.values())
        record.crew.update(self._names)
        record.finished.extend(sorted(self._finished))
        record.assigner = self._assigner

    def restore_from(self, record: state_pb2.JobRecord) -> None:
        """Goes on from a record."""
        self.active = {part.worker: GroupMember.from_proto(part) for part in record.parts}
        self._names, self._finished = dict(record.crew), set(record.finished)
        self._assigner = record.assigner

    def validate(self) -> None:
        """Raises AssertionError if an invariant is broken."""
        ranks = [participant.rank for participant in self.active.values()]
        assert len(set(ranks)) == len(ranks), "two workers share a rank"
        assert all(0 <= rank < self._spec.most_workers for rank in ranks)
        assert all(self._names[participant.rank] == worker for worker, participant in self.active.items())
