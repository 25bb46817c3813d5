"""Silent servers, such as stopped ones: nothing moves to them until they are heard of again, or lost."""

from dataclasses import replace
from typing import Any

import pytest

from shoal.variables import Variable
from shoal_coordinator.cluster.shards.rebalancer import LOOK_S, SETTLED_S
from shoal_coordinator.messages import AddBackup, Promote, SplitGroup
from support.clusters.cluster_rig import HEARTBEAT_TIMEOUT_S, KEEPING, Rig, job

POLICY = replace(KEEPING, smallest_move_bytes=1)
VARIABLES = {f"v{number}": Variable((8, 4)) for number in range(12)}
SILENT_S = HEARTBEAT_TIMEOUT_S / 2 + 1


def placed(*servers: str, **options: Any) -> Rig:
    """A job `a` whose shards are on their servers, without backups."""
    rig = Rig(POLICY).servers(*servers).workers("w0", "w1")
    rig.submit(job(**{"shards": 12, "replicas": 2, **options}))
    rig.describe("a", "w0", VARIABLES)
    return rig


def running(*servers: str, **options: Any) -> Rig:
    return placed(*servers, **options).start("a", "w0", "w1", variables=VARIABLES).pass_time(SETTLED_S)


def begun(rig: Rig, kind: type) -> list[Any]:
    return [it for it in rig.pending if isinstance(it, kind)]


def test_a_backup_is_made_on_another_server() -> None:
    rig = placed("s0", "s1", "s2", shards=1).pass_time(SILENT_S, "s1")
    rig.perform_first()
    [copy] = begun(rig, AddBackup)
    assert (copy.server.member, copy.backup.member) == ("s0", "s2")


@pytest.mark.parametrize("silent", ["s0", "s1"])
def test_a_backup_waits_if_there_is_no_other_server(silent: str) -> None:
    rig = placed("s0", "s1", shards=1).pass_time(SILENT_S, silent)
    rig.perform_first()
    assert not begun(rig, AddBackup)
    rig.pass_time(1)
    [copy] = begun(rig, AddBackup)
    assert (copy.server.member, copy.backup.member) == ("s0", "s1")


@pytest.mark.parametrize("replicas", [1, 2])
def test_no_share_of_a_job_moves_to_a_server_that_falls_silent_when_it_has_joined(replicas: int) -> None:
    rig = running("s0", "s1", replicas=replicas).servers("s2").pass_time(SETTLED_S, "s2")
    assert SETTLED_S > HEARTBEAT_TIMEOUT_S / 2
    assert not rig.pending
    rig.pass_time(LOOK_S + 1)
    assert begun(rig, SplitGroup)


def test_another_server_gets_its_share_meanwhile() -> None:
    rig = running("s0", "s1").servers("s2", "s3").pass_time(SETTLED_S, "s2")
    rig.perform(until=AddBackup)
    assert {it.backup.member for it in begun(rig, AddBackup)} == {"s3"}


def test_a_group_is_not_handed_over_to_it_for_even_shares() -> None:
    rig = running("s0", "s1", replicas=1).servers("s2").pass_time(SETTLED_S)
    rig.perform(until=AddBackup)
    rig.pass_time(SILENT_S, "s2")
    rig.perform_first()
    assert not rig.pending
    rig.pass_time(1)
    assert [it.server.member for it in begun(rig, Promote)] == ["s2"]


def test_a_draining_server_does_not_hand_over_to_it() -> None:
    rig = running("s0", "s1").pass_time(SILENT_S, "s0")
    assert rig.drain("s1") == ("a",)
    assert not begun(rig, Promote)
    rig.pass_time(1)
    assert [it.server.member for it in begun(rig, Promote)] == ["s0"]
    rig.perform()
    assert rig.drain("s1") == ()


def test_a_draining_server_goes_on_when_it_is_lost() -> None:
    rig = running("s0", "s1", "s2").pass_time(SILENT_S, "s0")
    rig.drain("s1")
    rig.kill("s0")
    rig.perform()
    assert rig.drain("s1") == ()
    assert rig.status("a").restarts == 0
