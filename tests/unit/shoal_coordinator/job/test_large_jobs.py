"""Jobs of a thousand workers: a decision about one of them writes one small record, however many there are."""

from collections.abc import Callable
from functools import partial

import pytest

from shoal._wire.placement import Placement
from shoal.consistency import Asynchronous
from shoal.job import Job
from shoal.status import JobState
from shoal.v1 import job_pb2, state_pb2
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards
from shoal_coordinator.job.group_member import GroupMember
from shoal_coordinator.job.machine import JobMachine
from shoal_coordinator.job.submission import Submission
from shoal_coordinator.messages import JobDescribed, JobRef, JobSnapshot, ProgramDescription, WorkerReported

VARIABLES = {"w": Variable((8, 4))}
PROGRAM = ProgramDescription(VARIABLES, 1 << 24)
START = 1_000.0


def assigned(rank: int) -> state_pb2.RankRecord:
    worker, assignment = f"w{rank}", rank + 1
    member = GroupMember(worker, incarnation=assignment, rank=rank, assignment=assignment)
    return state_pb2.RankRecord(worker=worker, member=member.to_proto())


class Written:
    """A job, and the records that each decision writes."""

    def __init__(self, workers: int) -> None:
        self.changed: set[str] = set()
        spec = Job("m:f", name="a", workers=workers, consistency=Asynchronous())
        submission = Submission(JobRef("a", 1), spec)
        state = state_pb2.JobRecord(state=job_pb2.STARTING, submitted_at=START)
        stored = JobSnapshot(
            submission.to_proto(), state=state, ranks={rank: assigned(rank) for rank in range(workers)}
        )
        self.job = JobMachine.restored(1, stored, START, self.changed.add)

    def by(self, decide: Callable[[], object]) -> tuple[set[str], int]:
        """Returns the names of the records that a decision writes, and their bytes in all."""
        self.changed.clear()
        decide()
        found = [self.job.record(name) for name in self.changed]
        return set(self.changed), sum(len(it.SerializeToString()) for it in found if it)

    def describe(self, worker: int) -> None:
        self.job.describe(JobDescribed("a", f"w{worker}", worker + 1, PROGRAM), START)

    def place(self) -> None:
        shards = assign_shards(plan_shards(VARIABLES, 2), [Candidate("s0", "h:1", 0)])
        self.job.place(Placement("a", 1, VARIABLES, shards), START)
        self.job.shards_created(START)


@pytest.mark.parametrize("workers", [5, 1_000])
def test_a_decision_about_a_worker_writes_its_rank(workers: int) -> None:
    written = Written(workers)
    job = written.job
    written.describe(0)
    written.place()
    for decide in (
        lambda: written.describe(3),
        lambda: job.join("w3", False, START, waits=True),
        lambda: job.admitted({4: 0}, START),
    ):
        names, size = written.by(decide)
        assert names == {"rank/3"}
        assert size < 40
    assert written.by(lambda: written.describe(3)) == (set(), 0), "nothing has changed"
    job.admitted(dict.fromkeys(range(1, workers + 1), 0), START)
    assert job.state is JobState.RUNNING
    for worker in range(workers):  # in order of rank, so that no range is skipped
        names, size = written.by(partial(job.lease, f"w{worker}", 0, START))
        assert names == {"ledger", f"lease/w{worker}"}
        assert size < 60
        job.report(report(worker), START)
    for decide in (lambda: job.finish("w2", "", START), lambda: job.lose("w3", START)):
        names, size = written.by(decide)
        assert len(names) <= 7
        assert size < 300
        job.validate()


def report(worker: int) -> WorkerReported:
    return WorkerReported("a", f"w{worker}", worker + 1, 8, accepted=8, samples=256, staleness={0: 4, 1: 3, 7: 1})


def test_the_reports_of_all_workers_are_encoded_later() -> None:
    """A checkpoint writes the reports as they were, although the function that makes the record is called later."""
    written = Written(5)
    for worker in range(4):
        written.job.report(report(worker), START)
    later = written.job.record_later("reports")
    written.job.report(report(4), START)
    written.job.lose("w0", START)
    found, current = later(), written.job.record("reports")
    assert isinstance(found, state_pb2.ReportsRecord)
    assert isinstance(current, state_pb2.ReportsRecord)
    assert (sorted(found.reports), sorted(current.reports)) == ([1, 2, 3, 4], [2, 3, 4, 5])
    written.job.fail("enough", START)
    assert written.job.record("reports") is None
