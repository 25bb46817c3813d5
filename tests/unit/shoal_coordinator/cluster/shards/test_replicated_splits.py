"""Lock groups that are split with their backups: two copies of each shard are complete at each moment."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.status import JobState
from shoal.variables import Variable
from shoal_coordinator.cluster.shards.rebalancer import SETTLED_S
from shoal_coordinator.job import GroupCopies
from shoal_coordinator.messages import (
    AddBackup,
    BackupFailed,
    DropBackup,
    DropCopy,
    ProbeServer,
    Promote,
    ServerRef,
    SplitGroup,
)
from support.clusters.cluster_rig import KEEPING, Rig, done_of, job
from support.run_lengths import draws

VARIABLES = {f"v{number}": Variable((512, 512)) for number in range(6)}


def splitting() -> tuple[Rig, SplitGroup]:
    """A job `a` with a group on p, and one on b, which are each other's backups. A group is being split for n."""
    rig = Rig(KEEPING).servers("p", "b").workers("w0", "w1")
    rig.submit(job(replicas=2, shards=6))
    rig.start("a", "w0", "w1", variables=VARIABLES).pass_time(SETTLED_S)
    rig.servers("n").pass_time(SETTLED_S)
    [split] = [it for it in rig.pending if isinstance(it, SplitGroup)]
    return rig, split


def groups(rig: Rig) -> dict[int, GroupCopies]:
    return {it.group: it for it in rig.machine.job("a").copies.groups}


def pending(rig: Rig, kind: type, group: int) -> Any:
    [found] = [it for it in rig.pending if isinstance(it, kind) and getattr(it, "group", None) == group]
    return found


def done(rig: Rig, effect: Any) -> None:
    rig.pending.remove(effect)
    rig.handle(done_of(effect))


def roles(group: GroupCopies) -> tuple[ServerRef, ServerRef | None, int]:
    return group.primary, group.backup, group.backup_term


def check_runs(rig: Rig) -> None:
    for _ in range(5):
        rig.perform()
        rig.pass_time(1)
    status = rig.status("a")
    assert (status.state, status.restarts, status.copies) == (JobState.RUNNING, 0, 2)


def kill(rig: Rig, server: ServerRef) -> None:
    rig.pending.clear()  # nobody has done them
    rig.kill(server.member)
    rig.pending = [*rig.machine.pending_effects]


def test_both_parts_keep_the_backup_with_connections_of_the_split() -> None:
    rig, split = splitting()
    before = groups(rig)[split.group]
    assert (split.keeps_term, split.backup) == (before.backup_term, before.backup)
    assert rig.status("a").copies == 2
    done(rig, split)
    for number in (split.group, min(split.shards)):
        assert roles(groups(rig)[number]) == (before.primary, before.backup, split.term)
    assert groups(rig)[min(split.shards)].shards == split.shards
    assert not any(isinstance(it, DropBackup) for it in rig.pending)
    check_runs(rig)


@pytest.mark.parametrize("crash", [False, True])
def test_a_lost_primary_is_replaced_and_its_heir_is_asked_to_split(crash: bool) -> None:
    rig, split = splitting()
    before = groups(rig)[split.group]
    assert before.backup
    kill(rig, before.primary)
    told = pending(rig, Promote, split.group)
    assert (told.server, told.split_off, told.keeps_term) == (before.backup, split.shards, 0)
    if crash:
        rig.crash()
        told = pending(rig, Promote, split.group)
    done(rig, told)
    again = pending(rig, SplitGroup, split.group)
    assert (again.server, again.shards, again.backup, again.keeps_term) == (before.backup, split.shards, None, 0)
    assert again.term == told.term + 1
    assert min(split.shards) not in groups(rig)
    done(rig, again)
    assert {groups(rig)[it].primary for it in (split.group, min(split.shards))} == {before.backup}
    check_runs(rig)


@pytest.mark.parametrize("how", ["lost", "reported", "refused", "reported by the part"])
def test_without_its_backup_the_group_is_split_again(how: str) -> None:
    rig, split = splitting()
    before = groups(rig)[split.group]
    assert before.backup
    if how == "lost":
        kill(rig, before.backup)
    elif how == "refused":
        rig.pending.remove(split)
        rig.handle(BackupFailed(split.job, split.group, split.term, "an earlier version", effect=split.number))
    else:
        term = before.backup_term if how == "reported" else split.term
        rig.break_replica(before.primary.member, "a", split.group, term=term)
        rig.pending.remove(split)
    told = pending(rig, DropBackup, split.group)
    assert (told.server, told.keeps_term, told.term) == (before.primary, 0, split.term + 1)
    rig.crash()
    done(rig, pending(rig, DropBackup, split.group))
    if how != "lost":
        assert pending(rig, DropCopy, split.group).server == before.backup
    again = pending(rig, SplitGroup, split.group)
    assert (again.server, again.shards, again.backup, again.term) == (before.primary, split.shards, None, told.term + 1)
    done(rig, again)
    assert min(split.shards) in groups(rig)
    check_runs(rig)


def test_a_backup_that_cannot_reach_its_primary_has_it_probed() -> None:
    for later in (False, True):
        rig, split = splitting()
        before = groups(rig)[split.group]
        assert before.backup
        term = split.term if later else before.backup_term
        rig.break_replica(before.backup.member, "a", split.group, term=term, sends=False)
        [probe] = [it for it in rig.pending if isinstance(it, ProbeServer)]
        assert probe.server == before.primary


def test_the_second_part_of_a_dropped_backup_is_freed() -> None:
    rig, split = splitting()
    before, part = groups(rig)[split.group], min(split.shards)
    assert before.backup
    rig.break_replica(before.backup.member, "a", part, term=split.term, sends=False)
    assert not any(isinstance(it, DropCopy) for it in rig.pending), "the coordinator does not know the part yet"
    rig.break_replica(before.primary.member, "a", split.group, term=split.term)
    rig.pending.remove(split)
    done(rig, pending(rig, DropBackup, split.group))
    done(rig, pending(rig, SplitGroup, split.group))
    rig.pending = [it for it in rig.pending if not isinstance(it, AddBackup)]
    if groups(rig)[part].second is None:
        rig.break_replica(before.backup.member, "a", part, term=split.term, sends=False)
        assert pending(rig, DropCopy, part).server == before.backup


@dataclass
class Copy:
    """A complete copy of a group on a server."""

    shards: frozenset[int]
    term: int
    is_primary: bool


@dataclass
class Servers:
    """The complete copies of the job's groups, by server and number."""

    held: dict[str, dict[int, Copy]] = field(default_factory=dict)

    def take(self, found: Sequence[GroupCopies]) -> None:
        for it in found:
            for server, term in ((it.primary, it.term), (it.backup, it.backup_term)):
                if server:
                    own = self.held.setdefault(server.member, {})
                    own[it.group] = Copy(frozenset(it.shards), term, server == it.primary)

    def divide(self, server: str, split: SplitGroup) -> None:
        own, leave = self.held[server], frozenset(split.shards)
        rest, number = own[split.group], min(leave)
        if leave <= rest.shards:
            own[number] = Copy(leave, split.term, rest.is_primary)
            rest.shards -= leave
        assert own[number].shards == leave
        rest.term = own[number].term = split.term

    def do(self, effect: Any, *, half: bool = False) -> None:
        """Carries out an effect. If `half` is set, the backup has not carried out the split."""
        if isinstance(effect, ProbeServer):
            return
        own = self.held.setdefault(effect.server.member, {})
        match effect:
            case SplitGroup():
                self.divide(effect.server.member, effect)
                assert own[effect.group].is_primary
                assert own[min(effect.shards)].is_primary
                if effect.backup and not half:
                    self.divide(effect.backup.member, effect)
            case Promote():
                for number in {effect.group, *effect.split_off[:1]}:
                    if number in own:
                        own[number].is_primary, own[number].term = True, effect.term
                assert own[effect.group].is_primary
            case AddBackup():
                copy = Copy(own[effect.group].shards, effect.term, is_primary=False)
                self.held.setdefault(effect.backup.member, {})[effect.group] = copy
            case DropBackup():
                own[effect.group].term = effect.term
            case DropCopy() if effect.group in own and own[effect.group].term < effect.term:
                del own[effect.group]


@settings(max_examples=draws(60), deadline=None)
@given(st.data())
def test_any_server_may_die_at_any_moment_of_a_split(data: st.DataObject) -> None:
    """Effects are done in any order, the coordinator may restart between any two, and one server dies.

    The primary and the backup may have split the group, or one of them, when the server dies.
    """
    rig, split = splitting()
    before = groups(rig)[split.group]
    assert before.backup
    servers = Servers()
    servers.take([*groups(rig).values()])
    for _ in range(data.draw(st.integers(0, 12), label="steps before it dies")):
        if data.draw(st.booleans(), label="crash"):
            rig.crash()
        if rig.pending:
            effect = rig.pending.pop(data.draw(st.integers(0, len(rig.pending) - 1), label="next"))
            later, rig.pending = rig.pending, [effect]
            servers.do(effect)
            rig.perform_first()
            rig.pending = [*later, *rig.pending]
        else:
            rig.pass_time(1)
        assert rig.status("a").copies == 2
    dies = data.draw(st.sampled_from("pbn"), label="dies")
    for effect in [it for it in rig.pending if isinstance(it, SplitGroup)]:
        match data.draw(st.sampled_from(["nobody", "the primary", "both"]), label="has split"):
            case "the primary":
                servers.do(effect, half=True)
            case "both":
                servers.do(effect)
    rig.pending.clear()
    rig.kill(dies)
    servers.held.pop(dies, None)
    rig.pending = [*rig.machine.pending_effects]
    for _ in range(6):
        while rig.pending:
            effect = rig.pending[0]
            if dies not in {it.member for it in getattr(effect, "servers", ())}:
                servers.do(effect)
            rig.perform_first()
        rig.pass_time(1)
    status = rig.status("a")
    assert (status.state, status.restarts, status.copies) == (JobState.RUNNING, 0, 2)
    for it in groups(rig).values():
        assert it.backup
        copies = [servers.held[server.member][it.group] for server in (it.primary, it.backup)]
        assert [copy.shards for copy in copies] == 2 * [{*it.shards}]
        assert copies[0].is_primary
