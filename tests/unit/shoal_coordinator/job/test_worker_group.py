"""Who has a part in a job, who may take one, and who is through."""

import pytest

from shoal.job import Job
from shoal.v1 import state_pb2
from shoal_coordinator.job.parts import GroupMember
from shoal_coordinator.job.worker_group import WorkerGroup
from shoal_coordinator.messages import WorkerReported

SPEC = Job("m:f", name="a", workers=2, min_workers=1, max_workers=3)


@pytest.fixture
def crew():
    """Two workers."""
    crew = WorkerGroup(SPEC)
    for rank, worker in enumerate(("w0", "w1")):
        crew.enrol(GroupMember(worker, rank + 1, rank, rank + 11))
    crew.validate()
    return crew


def leave(crew, worker):
    return crew.active.pop(worker).rank


def test_ranks_are_taken_by_those_that_work_and_those_that_are_through(crew):
    assert crew.free(range(3)) == [2]
    crew.finish(leave(crew, "w0"))
    assert crew.free(range(3)) == [2]
    crew.vacate(leave(crew, "w1"))
    assert crew.free(range(3)) == [1, 2]
    assert (crew.names, crew.finished) == (("w0",), 1)
    assert crew.is_finished("w0")
    assert not crew.is_finished("w1")


def test_a_rank_that_a_session_is_through_with_may_be_taken_again():
    crew = WorkerGroup(Job(name="s"))
    crew.enrol(GroupMember("x", 1, 0, 11))
    crew.finish(leave(crew, "x"))
    assert crew.free(range(1)) == [0]


def test_a_part_in_an_earlier_job_is_none(crew):
    assert crew.has_part("w0", 11)
    assert not crew.has_part("w0", 10)
    assert not crew.has_part("w9", 11)


def test_enough_and_all_of_them_are_admitted(crew):
    assert not crew.entering
    crew.admit(11, 5)
    assert crew.entering
    assert not crew.admitted
    crew.admit(12, 5)
    assert crew.admitted
    assert crew.active["w1"].step == 5
    crew.active.clear()
    assert not crew.admitted, "there are too few"


def test_the_step_is_that_of_the_worker_that_is_ahead(crew):
    assert crew.step == 0
    for worker, step in (("w0", 7), ("w1", 4)):
        assert crew.keep_report(WorkerReported("a", worker, 1, step=step)) is None
    assert crew.step == 7


def test_the_given_values_are_sent_by_one_that_knows_them(crew):
    crew.elect_value_sender()
    assert crew.value_sender == 0
    crew.active["w1"].described = True
    crew.elect_value_sender()
    assert crew.value_sender == 12
    crew.active["w0"].described = True
    crew.elect_value_sender()
    assert crew.value_sender == 12, "it is sending them"
    crew.vacate(leave(crew, "w1"))
    crew.elect_value_sender()
    assert crew.value_sender == 11


def test_a_record_is_all_that_there_is(crew):
    crew.finish(leave(crew, "w1"))
    crew.active["w0"].described = True
    crew.elect_value_sender()
    record, again, other = state_pb2.JobRecord(), state_pb2.JobRecord(), WorkerGroup(SPEC)
    crew.write_to(record)
    other.restore_from(record)
    other.write_to(again)
    other.validate()
    assert again == record
    assert (other.names, other.ranks, other.finished, other.value_sender) == (("w0", "w1"), {"w0": 0}, 1, 11)
    other.clear()
    assert (other.names, other.finished, other.value_sender) == ((), 0, 0)
