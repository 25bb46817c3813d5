"""Replicas over real connections: a primary and a backup of a lock group in two servers of this process."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import chain, repeat
from typing import Any

import numpy as np
import pytest

from shoal import consistency, errors, optim
from shoal._transport import PARAMETER_SERVER, Frame
from shoal._transport.lane import Lane
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import replica_pb2
from shoal_server.optimizers import compilation
from shoal_server.replication import backup_link
from shoal_server.replication.pieces import received_place
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
OPTIMIZERS = [
    optim.SGD(0.1),
    optim.Momentum(0.1),
    optim.Momentum(0.1, nesterov=True),
    optim.Adagrad(0.1),
    optim.RMSProp(0.1),
    optim.Adam(0.1),
    optim.AdamW(0.1),
    optim.FTRL(0.1),
    optim.Adam(0.1, clip_norm=1.0),
]


@pytest.fixture(params=MODES)
def replicas(request: pytest.FixtureRequest) -> Iterator[Replicas]:
    with Replicas(MODES[request.param], optim.Adam(0.1)) as started:
        yield started


def test_the_backup_has_the_bits_of_the_primary_and_goes_on_as_the_primary(replicas: Replicas) -> None:
    replicas.admit("w0")
    with replicas.client("w0") as worker:
        step(worker, 0)
        replicas.copy()
        for seed in range(1, 5):
            step(worker, seed)
        replicas.check_same()
        worker.pull()
        at = worker.step
        worker.push(gradients(9))
    replicas.promote()
    with replicas.client("w0", step=at) as again:
        before = replicas.group(1).version
        assert again.push(gradients(9)).outcome == "accepted"
        assert replicas.group(1).version == before, "the push was applied twice"
        assert step(again, 10) == "accepted"
        assert replicas.group(1).version == before + 1


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda it: str(it)[:24])
def test_every_optimizer_has_the_same_bits(optimizer: optim.Optimizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_shell, "HASHED_VERSIONS", 2)
    with Replicas(consistency.Synchronous(), optimizer) as rig:
        rig.admit("w0"), rig.admit("w1")
        rig.copy()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda name: train(rig, name, range(7)), ("w0", "w1")))
        assert rig.group(0).version == 7
        rig.check_same()


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_copy_is_made_while_large_pushes_go_on(mode: consistency.Consistency) -> None:
    with Replicas(mode, optim.Momentum(0.1), LARGE) as rig, ThreadPoolExecutor(3) as pool:
        names = ("w0", "w1", "w2")
        for name in names:
            rig.admit(name)
        training = [pool.submit(train, rig, name, range(12), LARGE) for name in names]
        wait_until(lambda: rig.group(0).version > 2, what="some updates")
        rig.copy()
        for each in training:
            each.result()
        rig.check_same()


def test_a_staged_push_is_committed_at_the_new_primary(replicas: Replicas) -> None:
    replicas.admit("w0")
    replicas.copy()
    stamp = Stamp("w0", 1, 0)
    primary = replicas.group(0)
    with replicas.client("w0") as worker:
        worker.pull()
    values = [primary.array(slab, "") for slab in range(2)]
    payload = {slab: np.ones(array.size, array.dtype) for slab, array in enumerate(values)}
    assert primary.stage(stamp, 1.0, 0, payload).outcome == "staged"
    told = primary.confirmation(set())  # as the call waits before it answers
    wait_until(lambda: told is None or not told.waits, what="the backup's confirmation")
    replicas.promote()
    assert replicas.group(1).commit(stamp).outcome == "accepted"
    assert replicas.group(1).version == 1
    replicas.stores[0].clear()  # as when the coordinator has declared the server lost
    with pytest.raises(errors.UnknownJob):
        primary.commit(stamp)


def test_an_old_primary_acknowledges_nothing_after_a_promotion(replicas: Replicas) -> None:
    replicas.admit("w0")
    replicas.copy()
    with replicas.client("w0") as worker, replicas.client() as reader, ThreadPoolExecutor(2) as pool:
        step(worker, 0)
        replicas.call(1, "Promote", pb.PromoteRequest(job="job", generation=1, group=0, term=2))
        wait_until(lambda: replicas.group(0).broken_replicas)
        calls: list[Future[Any]] = [pool.submit(step, worker, 1), pool.submit(reader.pull)]
        assert not wait(calls, 0.2).done, "answers of an old primary"
        assert replicas.group(0).broken_replicas[0].primary
        replicas.stores[0].clear()  # as when the coordinator has declared the server lost
        for call in calls:
            with pytest.raises((errors.Moved, errors.UnknownJob)):
                call.result()


def test_calls_that_wait_at_an_old_primary_are_sent_to_the_new_one_at_once() -> None:
    with Replicas(consistency.Synchronous(), optim.SGD(1.0)) as rig, ThreadPoolExecutor(1) as pool:
        rig.admit("w0"), rig.admit("w1")
        rig.copy()
        pulled: list[errors.ShoalError] = []
        answered = threading.Event()

        class Waiting:
            def answer(self, step: int) -> None:
                answered.set()

            def refuse(self, error: errors.ShoalError) -> None:
                pulled.append(error)
                answered.set()

        with rig.client("w0") as worker, rig.client("w1") as other:
            other.pull()
            step(worker, 0)
            rig.group(0).pull(Waiting(), Stamp("w0", 1, 1))  # waits until w1 has pushed
            assert not answered.is_set()
            rig.call(1, "Promote", pb.PromoteRequest(job="job", generation=1, group=0, term=2))
            pushed = pool.submit(other.push, gradients(3))
            rig.drop_copy(0)
            assert answered.wait(10)
            assert isinstance(pulled[0], errors.Moved)
            with pytest.raises((errors.Moved, errors.UnknownJob)):
                pushed.result()
        assert not rig.stores[0].hosted.all(), "its memory is free"
        assert not rig.group(1).follows


def test_a_stale_backup_is_freed_but_not_a_later_one(replicas: Replicas) -> None:
    replicas.admit("w0")
    replicas.copy()
    replicas.drop_backup(term=2)
    wait_until(lambda: replicas.group(1).broken_replicas, what="a backup without a primary")
    replicas.drop_copy(1, term=2)
    replicas.drop_copy(1, term=2)
    assert not replicas.stores[1].hosted.all()
    replicas.copy(term=3)
    replicas.drop_copy(1, term=2)
    replicas.drop_copy(1, term=3)
    with replicas.client("w0") as worker:
        assert step(worker, 1) == "accepted"
    replicas.check_same()


def test_answers_wait_for_a_lost_backup_until_the_coordinator_has_decided(replicas: Replicas) -> None:
    replicas.admit("w0")
    replicas.copy()
    with replicas.client("w0") as worker, ThreadPoolExecutor(1) as pool:
        step(worker, 0)
        replicas.lose_connection()
        pushed = pool.submit(step, worker, 1)
        assert not wait([pushed], 0.2).done
        replicas.drop_backup()
        assert pushed.result() == "accepted"
        assert not replicas.group(0).broken_replicas
        with pytest.raises(errors.ShoalError):
            wait_until(lambda: replicas.add_backup(term=3))
        assert step(worker, 2) == "accepted", "a copy that fails must not hold anything up"
        with pytest.raises(errors.Moved, match="term 1 of lock group 0 is over"):
            replicas.add_backup(term=1)


def test_a_backup_refuses_calls_and_an_incomplete_one_its_promotion(replicas: Replicas) -> None:
    replicas.admit("w0")
    with pytest.raises(errors.UnknownJob):
        replicas.promote()
    replicas.copy()
    with pytest.raises(errors.Moved, match="only backups"):
        replicas.call(1, "FenceWorkers", pb.FenceWorkersRequest(job="job"))
    with pytest.raises(errors.Moved, match="has the backup"):
        replicas.group(1).fence("w0", 1)


def test_a_server_with_other_kernels_is_refused(replicas: Replicas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "processor", chain(["haswell"], repeat("znver4")).__next__)
    with pytest.raises(errors.UnequalKernels, match="server-0 are for haswell, and those of this server for znver4"):
        wait_until(replicas.add_backup)
    monkeypatch.undo()
    replicas.copy()


def test_a_copy_that_waits_is_dropped_with_its_term() -> None:
    """It waits for the end of the open step, and would begin after the decision that ended its term."""
    with Replicas(consistency.Synchronous(), optim.SGD(0.1)) as rig:
        rig.admit("w0")
        rig.admit("w1")
        with rig.client("w0") as first, rig.client("w1") as second:
            first.pull()
            second.pull()
            first.push(gradients(0))
            assert not rig.add_backup()
            wait_until(rig.stores[1].hosted.all, what="the connection to the backup")
            rig.drop_backup()
            wait_until(lambda: not rig.stores[1].hosted.all(), what="the end of the connection")
            second.push(gradients(0))
            second.pull()
        assert rig.group(0).version == 1
        assert not rig.group(0).logs
        rig.copy(term=3)
        rig.check_same()


def test_a_late_request_does_not_replace_a_copy_of_a_later_decision(replicas: Replicas) -> None:
    replicas.copy(term=1)
    replicas.drop_backup(term=2)
    replicas.copy(term=3)
    with pytest.raises(errors.Moved, match="term 1 of lock group 0 is over"):
        replicas.add_backup(term=1)
    backup = replicas.group(1)
    assert replicas.add_backup(term=3), "the copy is the one that was made"
    assert replicas.group(1) is backup
    assert not replicas.group(0).broken_replicas


def test_a_backup_that_could_not_read_a_confirmed_input_is_not_promoted(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(*_: object) -> None:
        raise errors.BadRequest("an input of a later version of Shoal")

    replicas.admit("w0")
    replicas.copy()
    with replicas.client("w0") as worker, ThreadPoolExecutor(1) as pool:
        worker.pull()
        monkeypatch.setattr(backup_link, "decode_input", unreadable)
        pushed = pool.submit(worker.push, gradients(0))
        wait_until(lambda: replicas.group(0).broken_replicas, what="a broken replica")
        with pytest.raises(errors.ShoalError):
            replicas.promote()
        replicas.drop_backup(term=2)
        assert pushed.result().outcome == "accepted"


def test_a_copy_is_made_after_a_primary_was_gone_before_the_server_answered(
    replicas: Replicas, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, first = Lane.send, chain([True], repeat(False))

    def send(lane: Lane, kind: Any, *args: Any, **options: Any) -> None:
        if kind is Frame.END and next(first):
            lane.close()
            raise errors.Unreachable("the primary is gone")
        sent(lane, kind, *args, **options)

    monkeypatch.setattr(Lane, "send", send)
    with pytest.raises(errors.Unreachable):
        wait_until(replicas.add_backup)
    wait_until(lambda: not replicas.stores[1].hosted.all(), what="the end of the backup")
    replicas.copy(term=3)


def test_decisions_do_not_wait_for_calls_that_wait_for_them(replicas: Replicas) -> None:
    replicas.admit("w0")
    replicas.copy()
    replicas.lose_connection()
    request = pb.FenceWorkersRequest(job="job", workers=[pb.WorkerFence(worker="w1", incarnation=1)])
    [log] = replicas.group(0).logs
    fences = [replicas.stubs[0].FenceWorkers.future(request, timeout=20) for _ in range(12)]
    wait_until(lambda: log.waiting == 12, what="more calls than threads")
    begun = time.monotonic()
    replicas.drop_backup()
    assert [list(it.result().committed_steps) for it in fences] == [[0]] * 12
    assert time.monotonic() - begun < 10


HELLO = replica_pb2.ReplicaHello(job="job", generation=1, group=0, term=1, kernels=compilation.processor())


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"direction": 0}, "the direction 0; it must be INPUTS, COPIES or PART"),
        ({"direction": 1}, "is not that of lock group 0 of job job"),
        ({"direction": 1, "job": "a\nb"}, "the name of the job"),
        ({"direction": 2}, "no copy of lock group 0"),
        ({"direction": 3}, "is not that of lock group 0 of job job"),
    ],
    ids=str,
)
def test_a_hello_that_makes_no_sense_is_refused(fields: dict[str, Any], problem: str) -> None:
    hello = replica_pb2.ReplicaHello()
    hello.CopyFrom(HELLO)
    hello.MergeFrom(replica_pb2.ReplicaHello(**fields))
    with Replicas(consistency.Asynchronous(), optim.SGD(0.1)) as rig:
        hello.config.CopyFrom(rig.group(0).config.to_proto(()))
        with rig.lane(1) as lane:
            lane.send(Frame.REPLICA, hello.SerializeToString())
            with pytest.raises(errors.ShoalError, match=problem):
                lane.receive()
        assert not rig.stores[1].hosted.all()


def test_a_piece_that_ends_within_its_place_is_refused() -> None:
    ours, theirs = (Lane(end, "peer", PARAMETER_SERVER) for end in socket.socketpair())
    place = replica_pb2.ArrayPiece(slab=0, start=0, slot="momentum").SerializeToString()
    theirs.send(Frame.SLOTS, [(len(place) + 4).to_bytes(4, "little"), place])
    ours.begin()
    with pytest.raises(errors.BadFrame, match="cannot be read"):
        received_place(ours)
    for end in (ours, theirs):
        end.close()
