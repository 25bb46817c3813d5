"""Shards that move to servers that have fewer, with a fake clock."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from shoal.status import JobState, Role
from shoal.variables import Variable
from shoal_coordinator.cluster.shards.copy_keeper import COPIES_AT_A_TIME
from shoal_coordinator.cluster.shards.rebalancer import PAUSE_S, SETTLED_S
from shoal_coordinator.job import GroupCopies
from shoal_coordinator.messages import (
    AddBackup,
    CreateShards,
    DropBackup,
    DropCopy,
    Promote,
    ScanCheckpoints,
    SplitGroup,
    TakeCut,
    events,
)
from support.clusters.cluster_rig import FIXED, KEEPING, Rig, done_of, job, session
from support.run_lengths import draws

POLICY = replace(KEEPING, smallest_move_bytes=1)
VARIABLES = {f"v{number}": Variable((8, 4)) for number in range(12)}
NBYTES = 12 * 8 * 4 * 4


def running(*servers: str, **options: Any) -> Rig:
    """A job `a` of twelve equal shards, half on each of two servers by default."""
    rig = Rig(POLICY).servers(*(servers or ("s0", "s1"))).workers("w0", "w1")
    rig.submit(job(**{"shards": 12, **options}))
    return rig.start("a", "w0", "w1", variables=VARIABLES).pass_time(SETTLED_S)


def groups(rig: Rig) -> list[GroupCopies]:
    return rig.machine.job("a").copies.groups


def loads(rig: Rig) -> dict[str, int]:
    """Returns the bytes that each server serves."""
    found: dict[str, int] = {}
    for shard in rig.machine.job("a").placed.shards:
        found[shard.server] = found.get(shard.server, 0) + shard.layout.nbytes
    return found


def even_over(*servers: str) -> dict[str, int]:
    return dict.fromkeys(servers, NBYTES // len(servers))


def move_all(rig: Rig) -> list[type]:
    """Performs all effects until nothing moves any more. Returns their kinds."""
    begun, idle_s = len(rig.performed), 0
    while idle_s <= SETTLED_S + 1:
        idle_s = 0 if rig.perform() else idle_s + 1
        rig.pass_time(1)
    return [type(it) for it in rig.performed[begun:]]


class TestAServerThatComes:
    def test_gets_its_share_while_the_job_runs(self) -> None:
        rig = running()
        assert loads(rig) == even_over("s0", "s1")
        kinds = move_all(rig.servers("s2"))
        assert loads(rig) == even_over("s0", "s1", "s2")
        once = [SplitGroup, AddBackup, Promote, DropCopy]
        assert kinds == 2 * once
        status = rig.status("a")
        assert (status.state, status.restarts, status.copies) == (JobState.RUNNING, 0, 0)
        assert len(groups(rig)) == 4
        assert not any(it.second for it in groups(rig))
        assert any("moves to server s2" in reason for _, reason in rig.history("a"))

    def test_gets_nothing_before_the_servers_have_settled(self) -> None:
        rig = running().servers("s2").pass_time(SETTLED_S - 1)
        assert not rig.pending
        rig.servers("s3").pass_time(SETTLED_S - 1)
        assert not rig.pending
        rig.pass_time(2)
        assert [type(it) for it in rig.pending] == [SplitGroup]

    def test_and_leaves_again_gives_everything_back(self) -> None:
        rig = running()
        move_all(rig.servers("s2"))
        for _ in range(3):
            assert rig.drain("s2") == ("a",)
            move_all(rig)
            assert rig.drain("s2") == ()
            rig.leave("s2")
            move_all(rig)
            assert loads(rig) == even_over("s0", "s1")
            kinds = move_all(rig.servers("s2"))
            assert loads(rig) == even_over("s0", "s1", "s2")
            assert SplitGroup not in kinds, "the parts are there already"
        assert rig.status("a").restarts == 0

    def test_gets_its_share_of_a_replicated_job_that_keeps_two_copies(self) -> None:
        rig = running(replicas=2)
        kinds = move_all(rig.servers("s2"))
        assert loads(rig) == even_over("s0", "s1", "s2")
        assert rig.status("a").copies == 2
        assert all(it.backup for it in groups(rig))
        assert kinds.index(SplitGroup) < kinds.index(DropBackup), "a backup was dropped for a split"
        assert rig.machine.job("a").copies.backup_bytes() == even_over("s0", "s1", "s2")

    @pytest.mark.parametrize("lost_first", [False, True])
    def test_gets_no_group_for_the_price_of_its_second_copy(self, lost_first: bool) -> None:
        """The server that should take the third copy dies while the copy is made, and comes back."""
        rig = running(replicas=2).servers("s2").pass_time(SETTLED_S)
        while not any(isinstance(it, AddBackup) and it.as_backup for it in rig.pending):
            rig.perform_first()
        copy = next(it for it in rig.pending if isinstance(it, AddBackup) and it.as_backup)
        before = next(it for it in groups(rig) if it.group == copy.group)
        if lost_first:
            rig.kill(copy.backup.member).perform()
            rig.servers(copy.backup.member)
        else:
            rig.replace(copy.backup.member)
        after = next(it for it in groups(rig) if it.group == copy.group)
        assert (after.primary, after.backup) == (before.primary, before.backup)
        move_all(rig)
        assert loads(rig) == even_over("s0", "s1", "s2")
        assert rig.status("a").copies == 2

    def test_gets_its_share_of_a_session(self) -> None:
        rig = Rig(POLICY).servers("s0", "s1").join(Role.SESSION, "x")
        rig.submit(session("a", shards=12))
        rig.start("a", "x", variables=VARIABLES)
        move_all(rig.servers("s2"))
        assert loads(rig) == even_over("s0", "s1", "s2")
        assert rig.state("a") is JobState.RUNNING

    def test_gets_nothing_of_a_job_whose_servers_share_norms(self) -> None:
        rig = running(**FIXED)
        assert move_all(rig.servers("s2")) == []

    def test_that_fails_a_copy_is_left_alone_for_a_while(self) -> None:
        rig = running().servers("s2").pass_time(SETTLED_S)
        rig.perform(until=AddBackup)
        rig.handle(done_of(rig.pending.pop(0), "it has no memory"))
        rig.perform()
        rig.pass_time(PAUSE_S - 2)
        assert not rig.pending
        move_all(rig.pass_time(2))
        assert loads(rig) == even_over("s0", "s1", "s2")

    def test_that_fails_all_copies_costs_few_backups(self) -> None:
        rig = running(replicas=2).servers("s2").pass_time(SETTLED_S)
        refused = 0
        for _ in range(400):
            while rig.pending:
                effect = rig.pending[0]
                if isinstance(effect, AddBackup) and effect.backup.member == "s2":
                    rig.handle(done_of(rig.pending.pop(0), "it has other kernels"))
                    refused += 1
                else:
                    rig.perform_first()
            rig.pass_time(1)
        assert refused <= 6, "the pauses grow"
        assert all(it.backup for it in groups(rig))
        assert set(loads(rig)) == {"s0", "s1"}

    def test_gets_few_splits_at_a_time(self) -> None:
        rig = Rig(POLICY).servers("s0", "s1").workers(*(f"w{number}" for number in range(5)))
        for number in range(5):
            rig.submit(job(f"j{number}", workers=1, shards=12))
            rig.start(f"j{number}", f"w{number}", variables=VARIABLES)
        rig.pass_time(SETTLED_S).servers("s2").pass_time(SETTLED_S)
        begun = [it.server.member for it in rig.pending if isinstance(it, SplitGroup)]
        assert 0 < len(begun) <= 2 * COPIES_AT_A_TIME
        assert all(begun.count(server) <= COPIES_AT_A_TIME for server in begun)
        move_all(rig)
        assert all({it.server for it in rig.machine.job(f"j{n}").placed.shards} == {"s0", "s1", "s2"} for n in range(5))

    @pytest.mark.parametrize("replicas", [1, 2])
    @pytest.mark.parametrize("kind", [SplitGroup, AddBackup, Promote, DropCopy])
    def test_gets_its_share_though_the_coordinator_restarts(self, kind: type, replicas: int) -> None:
        rig = running(replicas=replicas).servers("s2").pass_time(SETTLED_S)
        rig.perform(until=kind)
        assert isinstance(rig.pending[0], kind)
        rig.crash()
        move_all(rig)
        assert loads(rig) == even_over("s0", "s1", "s2")
        assert all(it.told and bool(it.backup) == (replicas == 2) and not it.growing for it in groups(rig))

    @pytest.mark.parametrize("kind", [SplitGroup, AddBackup])
    def test_and_dies_meanwhile_costs_nothing(self, kind: type) -> None:
        rig = running().servers("s2").pass_time(SETTLED_S)
        rig.perform(until=kind)
        rig.kill("s2")
        move_all(rig)
        assert loads(rig) == even_over("s0", "s1")
        assert (rig.state("a"), rig.status("a").restarts) == (JobState.RUNNING, 0)


class TestACheckpoint:
    def test_delays_a_hand_over(self) -> None:
        rig = running().servers("s2").pass_time(SETTLED_S)
        rig.perform(until=AddBackup)
        rig.handle(events.CheckpointRequested("a"))
        made = rig.pending.pop(0)
        rig.handle(done_of(made))
        rig.pass_time(2)
        assert not any(isinstance(it, Promote) for it in rig.pending)
        move_all(rig)
        assert loads(rig) == even_over("s0", "s1", "s2")
        assert rig.checkpoint("a").number == 1

    def test_delays_a_split(self) -> None:
        rig = running()
        rig.handle(events.CheckpointRequested("a"))
        rig.servers("s2").pass_time(SETTLED_S + 2)
        assert [type(it) for it in rig.pending] == [ScanCheckpoints]
        rig.perform(until=TakeCut)
        move_all(rig)
        assert loads(rig) == even_over("s0", "s1", "s2")


def test_a_loss_during_a_move_sends_a_job_with_one_copy_to_its_checkpoint() -> None:
    rig = running()
    rig.handle(events.CheckpointRequested("a"))
    rig.perform(step=3)
    rig.servers("s2").pass_time(SETTLED_S)
    rig.perform(until=AddBackup)
    rig.kill("s0")
    assert rig.status("a").restarts == 1
    rig.servers("s0").start("a", "w0", "w1", variables=VARIABLES)
    assert rig.state("a") is JobState.RUNNING
    assert [len(it.shards) for it in groups(rig)] == [6, 6], "all shards of a server are one group again"


def test_a_job_that_is_placed_again_before_the_servers_have_settled_gets_even() -> None:
    rig = running("s0", "s1", "s2", shards=6)
    rig.handle(events.CheckpointRequested("a"))
    rig.perform(step=3)
    rig.kill("s0")
    rig.servers("s0").perform(until=CreateShards)
    rig.servers("s3").pass_time(SETTLED_S)  # the job waits for its shards meanwhile
    [effect] = [it for it in rig.pending if isinstance(it, CreateShards)]
    rig.handle(events.EffectFailed(effect.job, "s1 has dropped them", shards_lost=True, effect=effect.number))
    rig.start("a", "w0", "w1", variables=VARIABLES)
    move_all(rig)
    assert sorted(loads(rig).values()) == [NBYTES // 6, NBYTES // 6, NBYTES // 3, NBYTES // 3]


def test_the_lost_server_of_a_moved_group_is_replaced_by_its_backup() -> None:
    rig = running(replicas=2)
    move_all(rig.servers("s2"))
    rig.kill("s2")
    move_all(rig)
    status = rig.status("a")
    assert (status.state, status.restarts, status.failovers) == (JobState.RUNNING, 0, 1)
    assert loads(rig) == even_over("s0", "s1")


def test_users_see_the_old_groups_until_the_server_has_split_them() -> None:
    rig = running().servers("s2").pass_time(SETTLED_S)
    assert isinstance(rig.pending[0], SplitGroup)
    before = {shard.group for shard in rig.machine.job("a").placed.shards}
    assert len(before) == 2
    rig.perform(until=AddBackup)
    assert {shard.group for shard in rig.machine.job("a").placed.shards} > before


class Moves(RuleBasedStateMachine):
    """Servers come, leave and die while a job runs, and the coordinator restarts. In the end, all shares are even."""

    servers = st.sampled_from(["s0", "s1", "s2", "s3"])

    @initialize(replicas=st.sampled_from([1, 2]))
    def begin(self, replicas: int) -> None:
        self.rig = running(replicas=replicas, min_replicas=1)

    @rule(server=servers)
    def come(self, server: str) -> None:
        if not self.rig.machine.members.is_alive(server):
            self.rig.servers(server)

    @rule(server=servers)
    def drain(self, server: str) -> None:
        if self.rig.machine.members.is_alive(server):
            self.rig.drain(server)

    @rule(server=servers)
    def leave(self, server: str) -> None:
        if self.rig.machine.members.is_draining(server) and not self.rig.drain(server):
            self.rig.leave(server)

    @rule(server=servers)
    def die(self, server: str) -> None:
        if self.rig.machine.members.is_alive(server) and len(self.rig.machine.members.not_draining) > 1:
            self.rig.kill(server)

    @rule(seconds=st.sampled_from([1, 5]))
    def wait(self, seconds: float) -> None:
        self.rig.pass_time(seconds)

    @rule(fails=st.sampled_from([False, False, False, True]))
    def perform(self, fails: bool) -> None:
        if fails and self.rig.pending and isinstance(self.rig.pending[0], AddBackup):
            self.rig.handle(done_of(self.rig.pending.pop(0), "it has no memory"))
        elif self.rig.pending:
            self.rig.perform_first()

    @rule()
    def save(self) -> None:
        if self.rig.state("a") is JobState.RUNNING:
            self.rig.handle(events.CheckpointRequested("a"))

    @rule()
    def restart_coordinator(self) -> None:
        self.rig.crash()

    def teardown(self) -> None:
        if not hasattr(self, "rig"):
            return
        rig = self.rig
        for member in [it for it in rig.machine.members.alive(Role.SERVER) if it.draining]:
            move_all(rig)
            rig.leave(member.id)
        rig.servers(*(it for it in ("s0", "s1") if not rig.machine.members.is_alive(it)))
        move_all(rig.pass_time(PAUSE_S * 2))
        if rig.state("a") is not JobState.RUNNING:
            rig.start("a", "w0", "w1", variables=VARIABLES)
            move_all(rig.pass_time(PAUSE_S * 2))
        assert rig.state("a") is JobState.RUNNING
        live = [it.id for it in rig.machine.members.alive(Role.SERVER)]
        found = loads(rig)
        assert set(found) == set(live)
        assert max(found.values()) - min(found.values()) <= NBYTES // 12, "no shard could make them more even"
        assert all(it.told and not it.growing for it in groups(rig))


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=draws(8), stateful_step_count=30, deadline=None)
