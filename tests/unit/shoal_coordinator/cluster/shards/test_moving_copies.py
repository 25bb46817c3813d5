"""Replicated lock groups that move: two copies of each are complete at each moment, if a third server can take one."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._security import AccessRole, Principal
from shoal.status import JobState
from shoal.variables import Variable
from shoal_coordinator.cluster.shards.rebalancer import PAUSE_S, SETTLED_S
from shoal_coordinator.job import GroupCopies
from shoal_coordinator.member_holders import check_assigned
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    DropBackup,
    DropCopy,
    ProbeServer,
    Promote,
    ScanCheckpoints,
    TakeCut,
    events,
)
from support.clusters.cluster_rig import KEEPING, Rig, done_of, job

VARIABLES = {"w": Variable((8, 4))}


def running(*servers: str, **options: Any) -> Rig:
    """A job `a` with one group: its primary is on p, and its backup on b."""
    rig = Rig(KEEPING).servers("p", "b").workers("w0", "w1")
    rig.submit(job(replicas=2, shards=1, **options))
    rig.start("a", "w0", "w1", variables=VARIABLES)
    if group(rig).primary.member == "b":
        rig.drain("b")
        rig.perform()
        rig.leave("b")
        rig.servers("b").perform()
    assert names(rig) == ("p", "b")
    return rig.servers(*servers)


def group(rig: Rig) -> GroupCopies:
    [found] = rig.machine.job("a").copies.groups
    return found


def names(rig: Rig) -> tuple[str, ...]:
    """Returns the servers of the primary and the backup."""
    found = group(rig)
    return tuple(it.member for it in (found.primary, found.backup) if it)


def pending(rig: Rig, kind: type) -> Any:
    [found] = [it for it in rig.pending if isinstance(it, kind)]
    return found


def copied(rig: Rig, drained: str) -> AddBackup:
    """Drains a server until a copy is being made. Returns the effect."""
    rig.drain(drained)
    found: AddBackup = pending(rig, AddBackup)
    return found


def done(rig: Rig, effect: Any, failure: str = "") -> None:
    rig.pending.remove(effect)
    rig.handle(done_of(effect, failure))


def check_runs(rig: Rig, copies: int = 2) -> None:
    rig.perform()
    status = rig.status("a")
    assert (status.state, status.restarts, status.copies) == (JobState.RUNNING, 0, copies)


def check_each_loss(draining: str, *, complete: bool) -> None:
    """Loses each server while a draining one moves its copy, and checks that the job goes on with the other copies.

    Args:
        draining: the server that drains.
        complete: whether the third copy is complete.
    """
    for lost, left in (("p", ("b", "n")), ("b", ("p", "n")), ("n", ("p", "b"))):
        rig = running("n")
        copy = copied(rig, draining)
        if complete:
            done(rig, copy)
        rig.pending.clear()
        rig.kill(lost)
        rig.pending = [*rig.machine.pending_effects]
        rig.perform()
        status = rig.status("a")
        assert (status.state, status.restarts) == (JobState.RUNNING, 0), lost
        assert {*names(rig)} <= {*left}, lost


class TestABackupMoves:
    """Server b drains."""

    def test_after_the_next_one_is_complete(self) -> None:
        rig, before = running("n"), None
        before = group(rig)
        copy = copied(rig, "b")
        assert (copy.server.member, copy.backup.member) == ("p", "n")
        assert (copy.keeps_term, copy.as_backup) == (before.backup_term, False)
        assert names(rig) == ("p", "b")
        done(rig, copy)
        assert names(rig) == ("p", "n")
        told = pending(rig, DropBackup)
        assert (told.server.member, told.keeps_term, told.term) == ("p", copy.term, copy.term + 1)
        assert not any(isinstance(it, DropCopy) for it in rig.pending), "the primary may still wait for it"
        assert rig.drain("b") == ("a",)
        done(rig, told)
        assert pending(rig, DropCopy).server.member == "b"
        check_runs(rig)
        assert rig.drain("b") == ()

    def test_not_if_the_copy_fails(self) -> None:
        rig = running("n")
        before, copy = group(rig), copied(rig, "b")
        done(rig, copy, "no memory")
        told = pending(rig, DropBackup)
        assert (told.server.member, told.keeps_term) == ("p", before.backup_term)
        assert names(rig) == ("p", "b")
        done(rig, told)
        assert pending(rig, DropCopy).server.member == "n"
        check_runs(rig)
        assert rig.drain("b") == (), "no other server can take the copy"
        assert names(rig) == ("p", "b")

    def test_and_a_second_server_is_tried(self) -> None:
        rig = running("n", "m")
        copy = copied(rig, "b")
        done(rig, copy, "no memory")
        rig.perform()
        rig.pass_time(2).perform()
        other = {"n": "m", "m": "n"}[copy.backup.member]
        assert names(rig) == ("p", other)
        assert rig.drain("b") == ()

    @pytest.mark.parametrize("complete", [False, True])
    def test_and_each_server_may_be_lost(self, complete: bool) -> None:
        check_each_loss("b", complete=complete)

    def test_and_reports_name_the_connection_by_its_term(self) -> None:
        rig = running("n")
        before, copy = group(rig), copied(rig, "b")
        rig.break_replica("p", "a", 0, term=before.backup_term - 1 if before.backup_term > 1 else 99)
        assert group(rig).term == copy.term, "a report of an earlier copy"
        rig.break_replica("n", "a", 0, term=copy.term, sends=False)
        assert pending(rig, ProbeServer).server.member == "p"
        rig.break_replica("p", "a", 0, term=copy.term)
        told = pending(rig, DropBackup)
        assert (told.keeps_term, names(rig)) == (before.backup_term, ("p", "b"))

    def test_and_a_lost_backup_ends_both(self) -> None:
        rig = running("n")
        before, _ = group(rig), copied(rig, "b")
        rig.break_replica("p", "a", 0, term=before.backup_term)
        told = pending(rig, DropBackup)
        assert (told.server.member, told.keeps_term, names(rig)) == ("p", 0, ("p",))
        rig.perform()
        rig.pass_time(2)
        check_runs(rig)

    def test_and_a_stale_copy_is_freed(self) -> None:
        rig = running("n")
        copy = copied(rig, "b")
        before = group(rig)
        rig.break_replica("p", "a", 0, term=before.backup_term)
        rig.pending.remove(copy)
        rig.perform(until=AddBackup)
        rig.break_replica("n", "a", 0, term=copy.term, sends=False)
        assert pending(rig, DropCopy).server.member == "n"


class TestAPrimaryIsHandedOver:
    """Server p drains."""

    def test_after_its_backup_has_made_the_next_one(self) -> None:
        rig = running("n")
        copy = copied(rig, "p")
        assert (copy.server.member, copy.backup.member, copy.keeps_term, copy.as_backup) == ("b", "n", 0, True)
        done(rig, copy)
        told = pending(rig, Promote)
        assert (told.server.member, told.keeps_term, told.term) == ("b", copy.term, copy.term + 1)
        assert names(rig) == ("b", "n")
        assert not any(isinstance(it, DropCopy) for it in rig.pending)
        done(rig, told)
        assert pending(rig, DropCopy).server.member == "p"
        check_runs(rig)
        assert rig.drain("p") == ()

    def test_not_while_a_checkpoint_is_taken(self) -> None:
        rig = running("n")
        rig.handle(events.CheckpointRequested("a"))
        rig.perform(until=TakeCut)
        copy = copied(rig, "p")
        done(rig, copy)
        assert group(rig).grown
        assert names(rig) == ("p", "b")
        rig.crash()
        assert group(rig).grown
        rig.perform()
        assert names(rig) == ("b", "n")
        check_runs(rig)

    def test_at_once_if_there_is_no_third_server(self) -> None:
        rig = running()
        rig.drain("p")
        assert pending(rig, Promote).keeps_term == 0
        rig.perform()
        assert rig.drain("p") == ()
        check_runs(rig, copies=1)

    def test_at_once_if_no_other_server_takes_a_copy(self) -> None:
        rig = running("n")
        copy = copied(rig, "p")
        done(rig, copy, "no memory")
        told = pending(rig, DropBackup)
        assert (told.server.member, told.as_backup, told.keeps_term) == ("b", True, 0)
        done(rig, told)
        assert pending(rig, Promote).keeps_term == 0
        rig.perform()
        assert names(rig)[0] == "b"

    def test_at_once_if_time_runs_out(self) -> None:
        rig = running("n")
        rig.drain("p", 40.0)
        assert pending(rig, AddBackup)
        rig.pending.clear()
        rig.pass_time(14)
        rig.drain("p")
        assert not rig.pending
        rig.pass_time(2)
        assert pending(rig, Promote).keeps_term == 0
        assert not any(isinstance(it, ScanCheckpoints) for it in rig.pending)
        check_runs(rig)

    @pytest.mark.parametrize("complete", [False, True])
    def test_and_each_server_may_be_lost(self, complete: bool) -> None:
        check_each_loss("p", complete=complete)

    def test_and_the_next_backup_is_kept_if_the_primary_dies(self) -> None:
        rig = running("n")
        rig.handle(events.CheckpointRequested("a"))
        rig.perform(until=TakeCut)
        copy = copied(rig, "p")
        done(rig, copy)
        rig.pending.clear()
        rig.kill("p")
        told = pending(rig, Promote)
        assert (told.server.member, told.keeps_term) == ("b", copy.term)
        assert names(rig) == ("b", "n")

    def test_and_a_new_primary_that_loses_its_backup_before_it_knows_is_told_both(self) -> None:
        rig = running("n")
        copy = copied(rig, "p")
        done(rig, copy)
        first = pending(rig, Promote)
        rig.break_replica("b", "a", 0, term=copy.term, sends=True)
        second = next(it for it in rig.pending if isinstance(it, Promote) and it is not first)
        assert (second.server.member, second.keeps_term, second.term) == ("b", 0, first.term + 1)
        assert not any(isinstance(it, DropBackup) for it in rig.pending)
        rig.pending.remove(first)
        rig.crash()
        assert group(rig).promoted
        check_runs(rig)
        assert names(rig)[0] == "b"

    def test_and_a_sender_that_answers_has_lost_its_copy_only(self) -> None:
        rig = running("n")
        copy = copied(rig, "p")
        rig.break_replica("n", "a", 0, term=copy.term, sends=False)
        probe = pending(rig, ProbeServer)
        assert probe.server.member == "b"
        done(rig, probe)
        told = pending(rig, DropBackup)
        assert (told.server.member, told.as_backup) == ("b", True)
        assert names(rig) == ("p", "b")

    def test_and_both_servers_may_drain(self) -> None:
        rig = running("n", "m")
        rig.drain("b")
        rig.drain("p")
        for _ in range(3):
            rig.perform()
            rig.pass_time(1)
            assert rig.status("a").copies == 2
        assert rig.drain("b") == rig.drain("p") == ()
        assert {*names(rig)} == {"n", "m"}

    def test_and_the_backup_may_drain_meanwhile(self) -> None:
        rig = running("n", "m")
        copied(rig, "p")
        rig.drain("b")
        for _ in range(5):
            rig.perform()
            rig.pass_time(1)
            assert rig.status("a").copies == 2
        assert rig.drain("b") == rig.drain("p") == ()
        assert {*names(rig)} == {"n", "m"}

    def test_and_the_server_of_the_next_one_may_drain_meanwhile(self) -> None:
        rig = running("n", "m")
        copy = copied(rig, "p")
        rig.drain(copy.backup.member)
        for _ in range(5):
            rig.perform()
            rig.pass_time(1)
            assert rig.status("a").copies == 2
        assert rig.drain(copy.backup.member) == rig.drain("p") == ()


class TestGroupsMoveToAServerThatComes:
    def running(self, *more: str) -> Rig:
        """A job whose groups are all on s0, and that has more servers."""
        rig = Rig(replace(KEEPING, smallest_move_bytes=1)).servers("s0", "s1").workers("w0", "w1")
        rig.submit(job(replicas=2, shards=2))
        rig.start("a", "w0", "w1", variables={name: Variable((8, 4)) for name in "uv"}).pass_time(SETTLED_S)
        rig.kill("s1")
        rig.perform()
        rig.servers("s1", *more).perform()
        return rig.pass_time(SETTLED_S)

    def test_and_keep_two_copies(self) -> None:
        rig = self.running("s2")
        moved = 0
        for _ in range(20):
            while rig.pending:
                moved += isinstance(rig.perform_first(), Promote)
                assert rig.status("a").copies == 2
            rig.pass_time(1)
        assert moved == 1
        primaries = {it.primary.member for it in rig.machine.job("a").copies.groups}
        assert len(primaries) == 2

    def test_or_stay_if_no_other_server_takes_a_copy(self) -> None:
        rig = self.running("s2")
        failed = 0
        for _ in range(20):
            while rig.pending:
                effect = rig.pending[0]
                if isinstance(effect, AddBackup) and effect.as_backup:
                    failed += 1
                    done(rig, effect, "no memory")
                else:
                    rig.perform_first()
                assert rig.status("a").copies == 2
            rig.pass_time(1)
        assert failed == 2, f"a move to a server is tried again before {PAUSE_S} s have passed"
        assert {it.primary.member for it in rig.machine.job("a").copies.groups} == {"s0"}

    def test_and_a_hand_over_goes_on_after_a_restart_of_the_coordinator(self) -> None:
        rig = self.running("s2")
        while not any(isinstance(it, AddBackup) and it.as_backup for it in rig.pending):
            rig.perform_first()
        rig.crash()
        for _ in range(SETTLED_S.__ceil__() + 5):
            rig.perform()
            rig.pass_time(1)
        groups = rig.machine.job("a").copies.groups
        assert len({it.primary.member for it in groups}) == 2
        assert not any(it.growing for it in groups)
        check_runs(rig)


@given(st.data())
def test_any_server_may_die_at_any_moment_of_a_drain(data: st.DataObject) -> None:
    """Effects are done in any order, the coordinator may restart between any two, and one server dies."""
    may_fail = data.draw(st.booleans(), label="a copy fails, and a fourth server can take it")
    rig = running("n", *(["m"] if may_fail else []))
    drained, dies = data.draw(st.sampled_from("pb")), data.draw(st.sampled_from("pbn"))
    steps = data.draw(st.integers(0, 6), label="steps before it dies")
    rig.drain(drained)
    for _ in range(steps):
        if data.draw(st.booleans(), label="crash"):
            rig.crash()
        if rig.pending:
            effect = rig.pending.pop(data.draw(st.integers(0, len(rig.pending) - 1), label="next"))
            later, rig.pending = rig.pending, []
            if isinstance(effect, AddBackup) and may_fail and data.draw(st.booleans(), label="fails"):
                may_fail = False
                rig.handle(done_of(effect, "no memory"))
            else:
                rig.pending = [effect]
                rig.perform_first()
            rig.pending = [*later, *rig.pending]
        assert rig.status("a").copies == 2
    rig.pending.clear()  # the server has died before they were done
    rig.kill(dies)
    rig.pending = [*rig.machine.pending_effects]
    for _ in range(3):
        rig.perform()
        rig.pass_time(1)
    assert rig.status("a").restarts == 0
    assert rig.state("a") is JobState.RUNNING


def test_workers_are_admitted_after_the_last_of_two_promotions() -> None:
    rig = running("n", max_workers=3).workers("w2")
    rig.describe("a", "w2", VARIABLES)
    rig.enter("a", "w2")
    admission = pending(rig, AdmitWorker)
    rig.drain("p")
    done(rig, pending(rig, AddBackup))
    rig.break_replica("b", "a", 0, term=group(rig).backup_term, sends=True)
    told = [it for it in rig.machine.pending_effects if isinstance(it, AdmitWorker | Promote)]
    assert [type(it) for it in told] == [Promote, AdmitWorker]
    assert told[1].servers == (group(rig).primary,) != admission.servers


def test_a_backup_gets_tickets_only_while_it_makes_a_copy() -> None:
    rig, server = running("n"), Principal("servers", AccessRole.SERVER)
    check_assigned(rig.machine, server, "a", "p")
    with pytest.raises(errors.Forbidden, match="only for servers with shards of a"):
        check_assigned(rig.machine, server, "a", "b")
    copied(rig, "p")
    check_assigned(rig.machine, server, "a", "b")
    with pytest.raises(errors.Forbidden):
        check_assigned(rig.machine, server, "a", "n")
