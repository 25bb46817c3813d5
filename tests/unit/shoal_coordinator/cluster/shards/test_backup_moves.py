"""Backups that move to servers that have fewer of them, after the primaries are even."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.status import JobState
from shoal.variables import Variable
from shoal_coordinator.cluster.shards.rebalancer import PAUSE_S, SETTLED_S
from shoal_coordinator.job import GroupCopies
from shoal_coordinator.messages import AddBackup, DropBackup, DropCopy, Promote, ServerRef, SplitGroup
from support.clusters.cluster_rig import KEEPING, Rig, done_of, job, only
from support.run_lengths import draws

POLICY = replace(KEEPING, smallest_move_bytes=1)
NBYTES = 12 * 8 * 4 * 4


def running(*servers: str, shards: int = 12, **options: Any) -> Rig:
    """A job `a` of equal shards, whose groups have a backup each by default."""
    rig = Rig(POLICY).servers(*servers).workers("w0", "w1")
    rig.submit(job(**{"replicas": 2, "shards": shards, **options}))
    variables = {f"v{number}": Variable((8, 4)) for number in range(shards)}
    return rig.start("a", "w0", "w1", variables=variables).pass_time(SETTLED_S)


def groups(rig: Rig) -> dict[int, GroupCopies]:
    return {it.group: it for it in rig.machine.job("a").copies.groups}


def primaries(rig: Rig) -> dict[int, ServerRef]:
    return {number: it.primary for number, it in groups(rig).items()}


def loads(rig: Rig) -> dict[str, int]:
    """Returns the bytes that each server serves."""
    found: dict[str, int] = {}
    for shard in rig.machine.job("a").placed.shards:
        found[shard.server] = found.get(shard.server, 0) + shard.layout.nbytes
    return found


def backup_loads(rig: Rig) -> dict[str, int]:
    """Returns the bytes of the backups on each server, with those that are made now."""
    return rig.machine.job("a").copies.backup_bytes()


def even_over(*servers: str) -> dict[str, int]:
    return dict.fromkeys(servers, NBYTES // len(servers))


def move_all(rig: Rig) -> list[type]:
    """Performs all effects until nothing moves any more. Returns their kinds."""
    begun, idle_s = len(rig.performed), 0
    while idle_s <= SETTLED_S + 1:
        if rig.pending:
            rig.perform_first()
            idle_s = 0
        else:
            rig.pass_time(1)
            idle_s += 1
        assert len(rig.performed) < begun + 100, "the moves come to no end"
    return [type(it) for it in rig.performed[begun:]]


def moving() -> tuple[Rig, AddBackup]:
    """A job `a` on s0, s1 and s2, which joined last. The primaries are even, and the first backup moves to s2."""
    rig = running("s0", "s1").servers("s2").pass_time(SETTLED_S)
    for _ in range(100):
        if loads(rig) == even_over("s0", "s1", "s2") and any(isinstance(it, AddBackup) for it in rig.pending):
            break
        if rig.pending:
            rig.perform_first()
        else:
            rig.pass_time(1)
    rig.perform(until=AddBackup)
    return rig, only(rig.pending, AddBackup)


def check_runs(rig: Rig) -> None:
    status = rig.status("a")
    assert (status.state, status.restarts, status.failovers, status.copies) == (JobState.RUNNING, 0, 0, 2)


def done(rig: Rig, effect: Any, failure: str = "") -> None:
    rig.pending.remove(effect)
    rig.handle(done_of(effect, failure))


def test_a_server_that_joined_gets_backups_after_the_primaries_are_even() -> None:
    rig, effect = moving()
    before = primaries(rig)
    assert "s2" not in {it.backup.member for it in groups(rig).values() if it.backup}
    assert (effect.backup.member, effect.server, effect.as_backup) == ("s2", before[effect.group], False)
    kinds = move_all(rig)
    assert backup_loads(rig) == even_over("s0", "s1", "s2")
    assert primaries(rig) == before
    assert kinds == 2 * [AddBackup, DropBackup, DropCopy]
    check_runs(rig)


def test_a_backup_does_not_move_to_the_server_of_its_primary() -> None:
    """A backup whose primary is on s2 would make the shares even with fewer bytes than the one that moves."""
    rig, effect = moving()
    moved = groups(rig)[effect.group]
    assert moved.backup
    barred = [it for it in groups(rig).values() if it.primary.member == "s2" and it.backup == moved.backup]
    assert barred
    assert all(len(it.shards) < len(moved.shards) for it in barred)
    assert moved.primary.member != "s2"
    move_all(rig)
    assert all(it.backup and it.backup != it.primary for it in groups(rig).values())


def test_a_move_ends_when_the_former_backup_is_dropped() -> None:
    rig, effect = moving()
    before = groups(rig)[effect.group]
    assert before.backup
    check_runs(rig)
    done(rig, effect)
    dropped = only(rig.pending, DropBackup)
    after = groups(rig)[effect.group]
    assert (after.backup, after.former, after.told) == (effect.backup, (before.backup,), False)
    assert dropped.server == before.primary
    check_runs(rig)
    rig.pass_time(5)
    assert rig.pending == [dropped], "the next move waits for the end of this one"
    done(rig, dropped)
    assert only([it for it in rig.pending if isinstance(it, DropCopy)], DropCopy).server == before.backup
    rig.pass_time(1)
    following = only([it for it in rig.pending if not isinstance(it, DropCopy)], AddBackup)
    assert following.group != effect.group
    check_runs(rig)


def test_a_server_on_which_a_backup_fails_is_left_alone_for_a_while() -> None:
    rig, effect = moving()
    before = {number: it.backup for number, it in groups(rig).items()}
    for pause_s in (PAUSE_S, 2 * PAUSE_S):
        done(rig, effect, "it has no memory")
        rig.perform()
        rig.pass_time(pause_s - 2)
        assert not rig.pending
        assert {number: it.backup for number, it in groups(rig).items()} == before
        check_runs(rig)
        rig.pass_time(3)
        effect = only(rig.pending, AddBackup)
        assert effect.backup.member == "s2"
    move_all(rig)
    assert backup_loads(rig) == even_over("s0", "s1", "s2")


def test_a_job_with_one_copy_has_no_backup_that_moves() -> None:
    rig = running("s0", "s1", replicas=1)
    kinds = move_all(rig.servers("s2"))
    assert kinds == 2 * [SplitGroup, AddBackup, Promote, DropCopy], "the moves of the primaries"
    assert loads(rig) == even_over("s0", "s1", "s2")
    assert backup_loads(rig) == {}


@pytest.mark.parametrize("kind", [AddBackup, DropBackup, DropCopy])
def test_backups_get_even_though_the_coordinator_restarts(kind: type) -> None:
    rig, _ = moving()
    before = primaries(rig)
    rig.perform(until=kind)
    assert isinstance(rig.pending[0], kind)
    rig.crash()
    assert Promote not in move_all(rig)
    assert backup_loads(rig) == even_over("s0", "s1", "s2")
    assert primaries(rig) == before
    check_runs(rig)


@pytest.mark.parametrize("kind", [AddBackup, DropBackup])
@pytest.mark.parametrize("dies", ["s0", "s1", "s2"])
def test_a_server_that_dies_during_a_move_is_replaced(dies: str, kind: type) -> None:
    rig, _ = moving()
    rig.perform(until=kind)
    rig.pending.clear()  # nobody has done them
    rig.kill(dies)
    rig.pending = [*rig.machine.pending_effects]
    move_all(rig)
    status = rig.status("a")
    assert (status.state, status.restarts, status.copies) == (JobState.RUNNING, 0, 2)
    live = {"s0", "s1", "s2"} - {dies}
    assert set(loads(rig)) == set(backup_loads(rig)) == live
    move_all(rig.servers(dies))
    assert loads(rig) == backup_loads(rig) == even_over("s0", "s1", "s2")


@settings(max_examples=draws(8), deadline=None)
@given(st.data())
def test_moves_of_backups_come_to_an_end(data: st.DataObject) -> None:
    """Servers join a job, whose shards are equal, and some copies fail."""
    count = data.draw(st.integers(2, 4), label="servers")
    rig = running(*(f"s{it}" for it in range(count)), shards=data.draw(st.integers(4, 16), label="shards"))
    for number in range(count, count + data.draw(st.integers(1, 2), label="more")):
        rig.servers(f"s{number}").pass_time(SETTLED_S)
        idle_s, performed, failures = 0, 0, data.draw(st.integers(0, 2), label="failures")
        while idle_s < 2 * PAUSE_S + 5:
            if rig.pending and isinstance(rig.pending[0], AddBackup) and failures and data.draw(st.booleans()):
                done(rig, rig.pending[0], "it has no memory")
                failures -= 1
            elif rig.pending:
                rig.perform_first()
                idle_s, performed = 0, performed + 1
            else:
                rig.pass_time(1)
                idle_s += 1
            assert performed < 200, "the moves come to no end"
            assert rig.status("a").copies == 2
            assert all(it.primary.member not in {other.member for other in it.others} for it in groups(rig).values())
    check_runs(rig)
