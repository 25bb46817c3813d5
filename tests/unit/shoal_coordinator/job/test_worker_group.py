"""Worker group of a job: which workers have a rank, which may take one, and which have finished."""

import pytest

from shoal.job import Job
from shoal.status import JobMember
from shoal.v1 import state_pb2
from shoal_coordinator.job.group_member import GroupMember
from shoal_coordinator.job.worker_group import WorkerGroup
from shoal_coordinator.messages import WorkerReported

SPEC = Job("m:f", name="a", workers=2, min_workers=1, max_workers=3)


@pytest.fixture
def group() -> WorkerGroup:
    """Two workers."""
    group = WorkerGroup(SPEC)
    for rank, worker in enumerate(("w0", "w1")):
        group.add(GroupMember(worker, rank + 1, rank, rank + 11))
    group.validate()
    return group


def records(group: WorkerGroup) -> dict[int, state_pb2.RankRecord]:
    found = {rank: group.rank_record(rank) for rank in group.recorded_ranks}
    return {rank: record for rank, record in found.items() if record}


def leave(group: WorkerGroup, worker: str) -> int:
    return group.release(worker).rank


def test_ranks_are_taken_by_those_that_work_and_those_that_are_through(group: WorkerGroup) -> None:
    assert group.free(range(3)) == [2]
    group.finish(leave(group, "w0"))
    assert group.free(range(3)) == [2]
    group.vacate(leave(group, "w1"))
    assert group.free(range(3)) == [1, 2]
    assert (group.names, group.finished) == (("w0",), 1)
    assert group.is_finished("w0")
    assert not group.is_finished("w1")


def test_a_rank_that_a_session_is_finished_with_may_be_taken_again() -> None:
    group = WorkerGroup(Job(name="s"))
    group.add(GroupMember("x", 1, 0, 11))
    group.finish(leave(group, "x"))
    assert group.free(range(1)) == [0]
    group.add(GroupMember("y", 2, 0, 12))
    assert not group.is_finished("y")
    group.vacate(leave(group, "y"), "y is gone")
    group.validate()
    assert group.finished == 0


def test_an_assignment_of_an_earlier_job_does_not_count(group: WorkerGroup) -> None:
    assert group.has_assignment("w0", 11)
    assert not group.has_assignment("w0", 10)
    assert not group.has_assignment("w9", 11)


def test_enough_and_all_of_them_are_admitted(group: WorkerGroup) -> None:
    assert not group.entering
    group.admit({11: 5}, 0.0)
    assert group.entering
    assert not group.admitted
    group.admit({12: 5}, 0.0)
    assert group.admitted
    assert group.active["w1"].step == 5
    for worker in ("w0", "w1"):
        group.release(worker)
    assert not group.admitted, "there are too few"


def test_the_step_is_that_of_the_worker_that_is_ahead(group: WorkerGroup) -> None:
    assert group.step == 0
    for worker, step in (("w0", 7), ("w1", 4)):
        assert group.keep_report(WorkerReported("a", worker, 1, step=step), 0.0) is None
    assert group.step == 7


def test_the_step_follows_reports_and_workers_that_leave(group: WorkerGroup) -> None:
    def report(worker: str, step: int) -> int:
        group.keep_report(WorkerReported("a", worker, 1, step=step), 0.0)
        group.validate()
        return group.step

    assert [report("w0", 7), report("w1", 9), report("w0", 8)] == [7, 9, 9]
    assert report("w1", 0) == 8, "a report of log lines alone has step 0"
    assert report("w1", 8) == 8
    for worker, step in (("w0", 8), ("w1", 0)):
        rank = group.active[worker].rank
        group.release(worker)
        assert group.step == step
        group.vacate(rank)
        group.validate()


def test_the_given_values_are_sent_by_one_that_knows_them(group: WorkerGroup) -> None:
    group.elect_value_sender()
    assert group.value_sender == 0
    group.active["w1"].described = True
    group.elect_value_sender()
    assert group.value_sender == 12
    group.active["w0"].described = True
    group.elect_value_sender()
    assert group.value_sender == 12, "it is sending them"
    group.vacate(leave(group, "w1"))
    group.elect_value_sender()
    assert group.value_sender == 11


def test_a_record_is_all_that_there_is(group: WorkerGroup) -> None:
    group.finish(leave(group, "w1"))
    group.active["w0"].described = True
    group.elect_value_sender()
    record, again, other = state_pb2.JobRecord(), state_pb2.JobRecord(), WorkerGroup(SPEC)
    group.write_to(record)
    ranks = records(group)
    other.restore_from(record, ranks, 0.0)
    other.write_to(again)
    other.validate()
    assert (again, records(other)) == (record, ranks)
    assert (other.names, other.ranks, other.finished, other.value_sender) == (("w0", "w1"), {"w0": 0}, 1, 11)
    other.clear()
    assert (other.names, other.finished, other.value_sender) == ((), 0, 0)


def test_the_record_of_an_earlier_version_has_all_ranks() -> None:
    group = WorkerGroup(Job(name="s", workers=4))
    for rank, worker in enumerate(("a", "b", "c")):
        group.add(GroupMember(worker, rank + 1, rank, 13 - rank))
    group.finish(leave(group, "b"))
    group.vacate(leave(group, "c"), "c is gone")
    record = state_pb2.JobRecord(members=[group.active["a"].to_proto()], finished=[1, 3])
    record.worker_group.update({0: "a", 1: "b"})
    record.departed.update({2: "c is gone"})
    other = WorkerGroup(Job(name="s", workers=4))
    other.restore_from(record, {}, 0.0)
    other.validate()  # an earlier version could leave a finished rank without a name, as 3
    assert records(other) == records(group)


def test_a_rank_of_an_earlier_version_that_a_session_took_again_can_be_freed() -> None:
    taken = GroupMember("b", 2, 0, 12)
    record = state_pb2.JobRecord(members=[taken.to_proto()], finished=[0])
    record.worker_group.update({0: "b"})
    group = WorkerGroup(Job(name="s", workers=1))
    group.restore_from(record, {}, 0.0)
    group.validate()
    assert (group.finished, group.is_finished("b")) == (0, False)
    group.vacate(leave(group, "b"), "b is gone")
    other = WorkerGroup(Job(name="s", workers=1))
    other.restore_from(state_pb2.JobRecord(), records(group), 0.0)
    other.validate()
    assert other.why_left == "rank 0: b is gone"


def test_only_ranks_that_change_are_named() -> None:
    changed: list[str] = []
    group = WorkerGroup(SPEC, changed.append)

    def names() -> list[str]:
        found = sorted(set(changed))
        changed.clear()
        return found

    for rank, worker in enumerate(("w0", "w1")):
        group.add(GroupMember(worker, rank + 1, rank, rank + 11))
    assert names() == ["rank/0", "rank/1"]
    group.describe("w1")
    assert names() == ["rank/1"]
    group.elect_value_sender()
    group.elect_value_sender()
    assert names() == ["state"]
    group.ask_entry("w0")
    assert names() == [], "a worker asks the next coordinator again"
    assert [member.worker for member in group.waiting] == ["w0"]
    group.begin_entry("w0")
    assert (names(), group.waiting) == (["rank/0"], [])
    group.vacate(leave(group, "w1"))
    assert names() == ["rank/1"]
    assert group.rank_record(1) is None
    group.clear()
    assert names() == ["rank/0"]


def test_members_are_there_have_finished_or_have_left() -> None:
    group = WorkerGroup(Job(name="s", workers=3))
    for rank, worker in enumerate(("a", "b", "c")):
        group.add(GroupMember(worker, rank + 1, rank, rank + 11, step=4))
    group.keep_report(WorkerReported("s", "a", 1, step=7), 1.0)
    group.finish(group.release("b").rank)
    group.vacate(group.release("c").rank, "c left: the session raised ValueError: x")
    assert group.members == (
        JobMember("a", 0, "present", 7),
        JobMember("b", 1, "finished"),
        JobMember("c", 2, "left", reason="left: the session raised ValueError: x"),
    )
    assert group.why_left == "rank 2: c left: the session raised ValueError: x"
    assert JobMember.from_proto(group.members[2].to_proto()) == group.members[2]
    group.add(GroupMember("d", 4, 2, 14))
    assert (group.why_left, group.members[2].worker) == ("", "d")


def test_many_that_have_left_are_counted() -> None:
    group = WorkerGroup(Job(name="s", workers=12))
    for rank in range(12):
        group.add(GroupMember(f"w{rank}", 1, rank, rank + 1))
        group.vacate(group.release(f"w{rank}").rank, f"w{rank} is gone")
    assert group.why_left.endswith("rank 9: w9 is gone; and 2 more ranks")
