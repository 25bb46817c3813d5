"""Orders of users that servers drain, with a fake clock: what is refused, who waits, and when the servers leave."""

from typing import Any

import pytest

from shoal import errors
from shoal.status import JobState, MemberStatus, Role
from shoal.variables import Variable
from shoal_coordinator.messages import AddBackup, CommitCheckpoint, DrainOrder, ScanCheckpoints, events
from support.clusters.cluster_rig import FIXED, KEEPING, POLICY, Rig, done_of, job

VARIABLES = {name: Variable((8, 4)) for name in "uvw"}


def running(servers: int = 2, policy: Any = KEEPING, **options: Any) -> Rig:
    """A job `a` with shards on each server."""
    rig = Rig(policy).servers(*(f"s{index}" for index in range(servers))).workers("w0", "w1")
    rig.submit(job(**{"shards": servers, "epochs": 2, **options}))
    return rig.start("a", "w0", "w1", variables=VARIABLES)


def seen(rig: Rig, server: str) -> MemberStatus:
    return next(it for it in rig.machine.status(rig.now).members if it.member == server)


def told(rig: Rig, server: str) -> tuple[bool, bool]:
    """Returns what the reply to a heartbeat says: whether the server drains, and whether it has to leave."""
    reply = rig.handle(events.HeartbeatReceived(server, rig.lives[server]))
    return reply.drains, reply.leave


class TestAServer:
    def test_leaves_when_a_job_with_replicas_has_moved_off_it(self) -> None:
        rig = running(replicas=2)
        assert told(rig, "s1") == (False, False)
        rig.order_drain("s1")
        assert told(rig, "s1") == (True, False)
        before = seen(rig, "s1")
        assert (before.draining, before.drained, before.waiting_jobs) == (True, False, ("a",))
        rig.perform()
        assert told(rig, "s1") == (True, True)
        assert (seen(rig, "s1").drained, seen(rig, "s1").waiting_jobs) == (True, ())
        assert rig.drain("s1") == (), "its process asks once more"
        rig.leave("s1")
        assert (seen(rig, "s1").alive, seen(rig, "s1").drained) == (False, True)
        assert (rig.status("a").restarts, rig.status("a").failovers, rig.state("a")) == (0, 0, JobState.RUNNING)

    def test_leaves_when_a_job_without_replicas_has_moved_off_it(self) -> None:
        rig = running()
        rig.order_drain("s1")
        assert told(rig, "s1") == (True, False)
        while not told(rig, "s1")[1]:
            rig.pass_time(1).perform()
        rig.leave("s1")
        assert (rig.status("a").restarts, rig.state("a")) == (0, JobState.RUNNING)

    def test_leaves_when_a_job_that_cannot_move_is_saved_and_the_job_does_not_wait_for_it(self) -> None:
        rig = running(**FIXED)
        rig.order_drain("s1")
        rig.perform(until=CommitCheckpoint)
        assert told(rig, "s1") == (True, False)
        rig.perform()
        assert told(rig, "s1") == (True, True)
        rig.leave("s1")
        rig.start("a", "w0", "w1", variables=VARIABLES)
        assert rig.state("a") is JobState.RUNNING
        assert {shard.server for shard in rig.machine.job("a").placed.shards} == {"s0"}

    def test_waits_without_a_limit_while_its_jobs_cannot_be_saved(self) -> None:
        rig = running(**FIXED)
        rig.order_drain("s1")
        for _ in range(30):
            effect = next(it for it in rig.pending if isinstance(it, ScanCheckpoints))
            rig.pending.remove(effect)
            rig.handle(events.CheckpointFailed(effect.job, "the disk is full", effect=effect.number))
            rig.pass_time(6)
        assert told(rig, "s1") == (True, False)
        assert rig.state("a") is JobState.RUNNING

    def test_without_jobs_may_leave_at_once(self) -> None:
        rig = Rig(KEEPING).servers("s0", "s1")
        rig.order_drain("s1")
        assert told(rig, "s1") == (True, True)

    def test_stays_if_it_has_to_until_a_later_order(self) -> None:
        rig = Rig(KEEPING).servers("s0", "s1")
        rig.order_drain("s1", stay=True)
        assert told(rig, "s1") == (True, False)
        assert seen(rig, "s1").drained
        rig.order_drain("s1")
        assert told(rig, "s1") == (True, True)

    def test_drains_on_over_restarts_of_the_coordinator(self) -> None:
        rig = running(replicas=2)
        rig.order_drain("s1")
        rig.crash()
        assert told(rig, "s1") == (True, False)
        rig.perform()
        rig.crash()
        assert told(rig, "s1") == (True, True)

    def test_serves_again_as_a_new_incarnation(self) -> None:
        rig = Rig(KEEPING).servers("s0", "s1")
        rig.order_drain("s1")
        rig.leave("s1")
        rig.servers("s1")
        assert told(rig, "s1") == (False, False)
        assert not seen(rig, "s1").draining

    def test_that_already_drains_by_sigterm_is_not_expected_back_after_an_order(self) -> None:
        rig = running()
        rig.drain("s1")
        assert rig.machine.members.expected(rig.now) == {"s1": 0.0}
        rig.order_drain("s1")
        assert rig.machine.members.expected(rig.now) == {}

    def test_names_the_ended_jobs_whose_values_leave_with_it(self) -> None:
        rig = running()
        rig.handle(events.JobCancelled("a"))
        rig.order_drain("s1")
        assert seen(rig, "s1").ended_jobs == ("a",)
        assert told(rig, "s1") == (True, True)


def test_a_repeated_order_changes_nothing() -> None:
    rig = running()
    rig.order_drain("s1")
    before = list(rig.pending)
    rig.order_drain("s1")
    assert rig.pending == before
    rig.perform()
    rig.leave("s1")
    rig.order_drain("s1")  # it has left, as it was ordered to
    assert not seen(rig, "s1").alive


def test_two_servers_drain_at_once() -> None:
    rig = running(3, replicas=2)
    rig.order_drain("s1")
    rig.order_drain("s2", force=True)
    rig.perform()
    while not (told(rig, "s1")[1] and told(rig, "s2")[1]):
        rig.pass_time(1).perform()
    assert {it.primary.member for it in rig.machine.job("a").copies.groups} == {"s0"}
    assert rig.status("a").restarts == 0


class TestRefused:
    @pytest.mark.parametrize(
        ("server", "error", "message"),
        [
            ("nobody", errors.UnknownMember, "cannot drain 'nobody': it is not a member"),
            ("w0", errors.BadRequest, "w0 is a worker; only servers can be drained"),
        ],
    )
    def test_is_what_is_no_server(self, server: str, error: type[errors.ShoalError], message: str) -> None:
        with pytest.raises(error, match=message):
            running().order_drain(server)

    def test_is_a_lost_server(self) -> None:
        rig = running()
        rig.kill("s1")
        with pytest.raises(errors.UnknownMember, match="it is lost"):
            rig.order_drain("s1")

    def test_is_another_incarnation(self) -> None:
        rig = running()
        order = events.DrainOrdered("s1", DrainOrder(), rig.lives["s1"] + 1)
        with pytest.raises(errors.Fenced, match="it is now incarnation"):
            rig.handle(order)

    def test_is_the_last_server_of_a_job_unless_forced(self) -> None:
        rig = running(1)
        with pytest.raises(errors.ServerNeeded, match=r"the last server .* job a would wait for another server"):
            rig.order_drain("s0")
        assert not seen(rig, "s0").draining
        rig.order_drain("s0", force=True)
        rig.perform()
        assert told(rig, "s0") == (True, True)
        assert rig.checkpoint("a").number == 1

    def test_is_the_last_server_to_which_a_job_moves(self) -> None:
        rig = running(1).servers("s1")
        rig.order_drain("s0")
        assert rig.machine.job("a").servers[0].member == "s0", "it has not moved yet"
        with pytest.raises(errors.ServerNeeded, match=r"the last server .* job a would wait for another server"):
            rig.order_drain("s1")
        rig.perform()
        assert told(rig, "s0") == (True, True)
        assert rig.status("a").restarts == 0

    def test_is_the_loss_of_values_unless_forced(self) -> None:
        rig = running(policy=POLICY, **FIXED)
        with pytest.raises(errors.ServerNeeded, match="job a would lose the values there and fail"):
            rig.order_drain("s1")
        rig.order_drain("s1", force=True)
        assert told(rig, "s1") == (True, True)

    def test_is_not_the_last_server_without_jobs(self) -> None:
        rig = Rig(KEEPING).servers("s0")
        rig.order_drain("s0")
        assert told(rig, "s0") == (True, True)

    def test_is_not_a_server_of_a_job_with_replicas_but_it_stays_if_the_job_cannot_move(self) -> None:
        rig = running(policy=POLICY, replicas=2)
        rig.kill("s0")
        rig.perform()
        rig.servers("s0")
        rig.order_drain("s1")
        for _ in range(3):
            rig.pass_time(60)
            while copy := next((it for it in rig.pending if isinstance(it, AddBackup)), None):
                rig.pending.remove(copy)
                rig.handle(done_of(copy, "server s0 is full"))
            rig.perform(until=AddBackup)
        assert told(rig, "s1") == (True, False)
        assert seen(rig, "s1").waiting_jobs == ("a",)
        rig.order_drain("s1", force=True)
        rig.pass_time(1)
        assert told(rig, "s1") == (True, True)


def test_an_order_for_a_session_is_refused() -> None:
    rig = Rig(KEEPING).join(Role.SESSION, "x")
    with pytest.raises(errors.BadRequest, match="x is a session"):
        rig.order_drain("x")
