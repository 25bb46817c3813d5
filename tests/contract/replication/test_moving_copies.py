"""Copies that move, over real connections: at each moment, two servers have every update that was acknowledged.

Server 0 has the primary, server 1 its backup, and server 2 gets the next copy.
"""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from shoal import consistency, errors, optim
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.shards import Stamp
from shoal_server.shards.group import group_shell
from support.clusters.replica_servers import LARGE, Replicas, gradients, step, train
from support.waiting import wait_until

MODES = {
    "sync": consistency.Synchronous(),
    "backup workers": consistency.Synchronous(backup_workers=1),
    "async": consistency.Asynchronous(),
    "ssp": consistency.BoundedStaleness(2),
}
WORKERS = ("w0", "w1", "w2")


@pytest.fixture(params=MODES)
def rig(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    with Replicas(MODES[request.param], optim.Adam(0.1), servers=3) as started:
        started.admit("w0")
        started.copy(1)
        yield started


def move_backup(rig: Replicas) -> None:
    """Lets server 2 become the backup instead of server 1, as the coordinator does."""
    rig.copy(2, to=2, keeps=1)
    rig.drop_backup(3, keeps=2)
    rig.drop_copy(1, 3)


def hand_over(rig: Replicas) -> None:
    """Lets server 1 become the primary and server 2 its backup, as the coordinator does."""
    rig.copy(2, to=2, sender=1, as_backup=True)
    rig.promote(3, server=1, keeps=2)
    rig.drop_copy(0, 3)


MOVES = {"move": move_backup, "hand over": hand_over}


def held(pushed: Future[Any]) -> bool:
    return not wait([pushed], 0.2).done


class TestABackupMoves:
    def test_and_the_next_one_can_become_the_primary(self, rig: Replicas) -> None:
        with rig.client("w0") as worker:
            step(worker, 0)
            rig.copy(2, to=2, keeps=1)
            step(worker, 1)
            rig.check_same(1, 2)
            rig.drop_backup(3, keeps=2)
            rig.drop_backup(3, keeps=2)
            wait_until(lambda: rig.group(1).broken_replicas, what="a backup without a primary")
            assert [(it.term, it.primary) for it in rig.group(1).broken_replicas] == [(1, False)]
            rig.drop_copy(1, 3)
            assert not rig.stores[1].hosted.all()
            step(worker, 2)
            rig.check_same(2)
            before, at = rig.group(0).version, worker.step
        rig.promote(4, server=2)
        with rig.client("w0", step=at) as again:
            assert step(again, 3) == "accepted"
        assert rig.group(2).version == before + 1

    @pytest.mark.parametrize(("lost", "stays"), [(1, 2), (2, 1)])
    def test_and_answers_wait_for_both_until_the_coordinator_has_decided(
        self, rig: Replicas, lost: int, stays: int
    ) -> None:
        rig.copy(2, to=2, keeps=1)
        with rig.client("w0") as worker, ThreadPoolExecutor(1) as pool:
            step(worker, 0)
            rig.endpoints[lost].stop()
            wait_until(lambda: rig.group(0).broken_replicas, what="a broken connection")
            assert [(it.term, it.primary) for it in rig.group(0).broken_replicas] == [(lost, True)]
            pushed = pool.submit(step, worker, 1)
            assert held(pushed)
            rig.drop_backup(3, keeps=stays)
            assert pushed.result() == "accepted"
            step(worker, 2)
            rig.check_same(stays)

    def test_and_the_earlier_one_can_become_the_primary_before_the_decision(self, rig: Replicas) -> None:
        rig.copy(2, to=2, keeps=1)
        with rig.client("w0") as worker, ThreadPoolExecutor(1) as pool:
            step(worker, 0)
            rig.promote(3, server=1)
            wait_until(lambda: rig.group(0).broken_replicas)
            fence = pb.FenceWorkersRequest(job="job", workers=[pb.WorkerFence(worker="w9", incarnation=1)])
            fenced = pool.submit(rig.call, 0, "FenceWorkers", fence)
            assert held(fenced), "an old primary answers, because its other copy confirms"
            rig.drop_copy(0, 3)
            with pytest.raises((errors.Moved, errors.UnknownJob)):
                fenced.result()
            wait_until(lambda: rig.group(2).broken_replicas, what="a copy without a sender")

    def test_but_a_copy_that_is_not_complete_is_never_kept(self, rig: Replicas) -> None:
        with pytest.raises(errors.Moved, match="has no complete copy of term 2 here"):
            rig.drop_backup(3, keeps=2)
        with pytest.raises(errors.Moved, match="has no complete copy of term 7 here"):
            wait_until(lambda: rig.add_backup(8, to=2, keeps=7))
        with rig.client("w0") as worker:
            assert step(worker, 0) == "accepted", "the backup is lost"
        rig.check_same(1)


class TestAPrimaryIsHandedOver:
    def test_and_the_new_one_has_a_complete_backup(self, rig: Replicas) -> None:
        with rig.client("w0") as worker:
            step(worker, 0)
            rig.copy(2, to=2, sender=1, as_backup=True)
            step(worker, 1)
            rig.check_same(1, 2)
            worker.pull()
            at = worker.step
            worker.push(gradients(9))
            rig.promote(3, server=1, keeps=2)
            rig.promote(3, server=1, keeps=2)
        with rig.client("w0", step=at) as again:
            before = rig.group(1).version
            assert again.push(gradients(9)).outcome == "accepted"
            assert rig.group(1).version == before, "the push was applied twice"
            assert step(again, 3) == "accepted"
            rig.check_same(2)
            at = again.step
        rig.promote(4, server=2)
        with rig.client("w0", step=at) as last:
            assert step(last, 4) == "accepted"
        assert rig.group(2).version == before + 2

    def test_and_nothing_is_acknowledged_that_its_backup_lacks(self, rig: Replicas) -> None:
        rig.copy(2, to=2, sender=1, as_backup=True)
        with rig.client("w0") as worker, ThreadPoolExecutor(1) as pool:
            step(worker, 0)
            rig.endpoints[2].stop()
            wait_until(lambda: rig.group(1).broken_replicas, what="a broken connection")
            assert [(it.term, it.primary) for it in rig.group(1).broken_replicas] == [(2, True)]
            pushed = pool.submit(step, worker, 1)
            assert held(pushed)
            rig.drop_backup(3, sender=1, as_backup=True)
            assert pushed.result() == "accepted"
            rig.check_same(1)

    def test_and_a_backup_whose_primary_is_lost_takes_over_alone(self, rig: Replicas) -> None:
        rig.copy(2, to=2, sender=1, as_backup=True)
        with rig.client("w0") as worker:
            step(worker, 0)
            at = worker.step
        rig.stores[0].clear()
        rig.promote(3, server=1)
        wait_until(lambda: rig.group(2).broken_replicas, what="a copy without a sender")
        with rig.client("w0", step=at) as again:
            assert step(again, 1) == "accepted"
        rig.copy(4, to=2)
        rig.check_same(2)

    def test_and_inputs_that_wait_for_a_lost_copy_hold_up_no_promotion(self, rig: Replicas) -> None:
        rig.copy(2, to=2, sender=1, as_backup=True)
        with rig.client("w0") as worker, ThreadPoolExecutor(1) as pool:
            step(worker, 0)
            [log] = rig.group(1).logs
            sending, ended = threading.Event(), threading.Event()

            class Stuck:
                """A connection to a server that does not read."""

                def __getattr__(self, name: str) -> Any:
                    return getattr(sender, name)

                def gradient(self, payload: Any) -> int:
                    sending.set()
                    assert ended.wait(20)
                    return 0

                def close(self) -> None:
                    ended.set()
                    sender.close()

            sender, log.sender = log.sender, Stuck()
            pushed = pool.submit(step, worker, 1)
            assert sending.wait(10)
            begun = time.monotonic()
            rig.promote(3, server=1)
            assert time.monotonic() - begun < 10
            rig.drop_copy(0, 3)
            acknowledged = not pushed.exception() and pushed.result() == "accepted"
            assert rig.group(1).version >= 1 + acknowledged

    def test_but_not_by_a_server_in_another_role(self, rig: Replicas) -> None:
        with pytest.raises(errors.Moved, match="no complete backup of lock group 0"):
            wait_until(lambda: rig.add_backup(2, to=2, sender=0, as_backup=True))
        with pytest.raises(errors.Moved, match="has the backup of these shards"):
            wait_until(lambda: rig.add_backup(2, to=2, sender=1))
        with pytest.raises(errors.Moved, match="has the backup of these shards"):
            rig.drop_backup(2, sender=1)
        with pytest.raises(errors.Moved, match="has no complete copy of term 2 here"):
            rig.promote(3, server=1, keeps=2)

    def test_and_a_push_that_is_staged_is_committed_there(self, rig: Replicas) -> None:
        with rig.client("w0") as worker:
            worker.pull()
            payload = dict(enumerate(rig.group(0).slab_values))
            assert rig.group(0).stage(Stamp("w0", 1, 0), 1.0, 0, payload).outcome == "staged"
        hand_over(rig)
        rig.promote(4, server=2)
        assert rig.group(2).commit(Stamp("w0", 1, 0)).outcome == "accepted"
        assert rig.group(2).version == 1


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_large_pushes_go_on_and_count_once(
    mode: consistency.Consistency, move: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_shell, "HASHED_VERSIONS", 2)
    with Replicas(mode, optim.Momentum(0.1), LARGE, servers=3) as rig, ThreadPoolExecutor(3) as pool:
        rig.copy(1)
        for name in WORKERS:
            rig.admit(name)
        training = [pool.submit(train, rig, name, range(12), LARGE) for name in WORKERS]
        wait_until(lambda: rig.group(0).version > 2, what="some updates")
        move(rig)
        for each in training:
            each.result()
        rig.check_same(2)
        if isinstance(mode, consistency.Synchronous):
            assert rig.group(rig.primary).version >= 12
        else:
            assert rig.group(rig.primary).version == 36


def test_chains_of_hand_overs_keep_the_state_of_the_machine(rig: Replicas) -> None:
    """The copy of a backup has the tickets of the first primary, and then those of the second one."""
    rig.admit("w1")
    with ThreadPoolExecutor(2) as pool:
        training = [pool.submit(train, rig, name, range(15)) for name in ("w0", "w1")]
        hand_over(rig)  # 1 and 2
        rig.copy(4, to=0, sender=2, as_backup=True)
        rig.promote(5, server=2, keeps=4)
        rig.drop_copy(1, 5)
        rig.copy(6, to=1, keeps=4)
        rig.drop_backup(7, keeps=6)
        rig.drop_copy(0, 7)
        for each in training:
            each.result()
    rig.check_same(1)
