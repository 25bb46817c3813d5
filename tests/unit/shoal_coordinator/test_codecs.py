"""Replies of the coordinator: how a job has ended, for its sessions."""

import pytest

from shoal.status import Role
from shoal.v1 import job_pb2
from shoal_coordinator.api.codecs import end_message
from shoal_coordinator.messages import events
from support.clusters.cluster_rig import KEEPING, Rig, job, session


@pytest.fixture
def rig() -> Rig:
    return Rig(KEEPING).servers("s0").workers("w0", "w1").join(Role.SESSION, "x")


def test_sessions_of_an_ended_job_get_its_state_reason_and_newest_checkpoint(rig: Rig) -> None:
    rig.submit(session(shards=1))
    rig.start("s", "x")
    assert end_message(rig.machine.job("s"), rig.now) is None, "it goes on"
    rig.handle(events.CheckpointRequested("s"))
    rig.perform(step=7)
    rig.handle(events.JobCancelled("s", "enough"))
    end = end_message(rig.machine.job("s"), rig.now)
    assert end
    assert (end.state, end.reason, end.checkpoint.number) == (job_pb2.CANCELLED, "enough", 1)
    assert [it.name for it, _ in end.ListFields()] == ["state", "reason", "checkpoint"]


def test_workers_of_programs_are_told_by_their_heartbeats(rig: Rig) -> None:
    rig.submit(job())
    rig.start("a", "w0", "w1")
    rig.handle(events.JobCancelled("a"))
    assert end_message(rig.machine.job("a"), rig.now) is None
