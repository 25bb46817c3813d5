"""Lock groups that are split while workers train: each push counts once. The test plays the coordinator.

Updates are whole numbers, so sums show how often each push was applied, whatever the order.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import numpy as np
import pytest

from shoal import consistency, errors, optim
from shoal._transport import shared_memory
from shoal.v1 import parameter_server_pb2 as pb
from shoal_server.shards import Stamp, WorkerProgress
from support.clusters.split_servers import (
    AT_ONCE,
    FEW,
    LARGE,
    MODES,
    OVERLAPPED,
    SMALL,
    VARIABLES,
    Splits,
    begin,
    check_values,
    ones,
    stage_ones,
)
from support.waiting import wait_until


def splits_and_moves(rig: Splits) -> None:
    rig.split(0, [3, 5])
    rig.split(0, [1])
    rig.move(3)
    rig.split(3, [5], server=1)


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for name, mode in MODES.items() for way in AT_ONCE + OVERLAPPED * mode.overlaps],
)
def test_pushes_count_once_while_groups_are_split(name: str, way: str, thread: ThreadPoolExecutor) -> None:
    mode = MODES[name]
    with Splits(mode) as rig:
        training = begin(rig, thread, 3, 40, way)
        splits_and_moves(rig)
        accepted = sum(each.result(60) for each in training)
        assert [sorted(rig.groups(server)) for server in (0, 1)] == [[0, 1], [3, 5]]
        check_values(rig, mode, 3, 40, accepted)


@pytest.mark.parametrize("transport", ["auto", "tcp", "grpc"])
@pytest.mark.parametrize("way", AT_ONCE + OVERLAPPED)
def test_large_pushes_count_once_on_each_transport(
    transport: str, way: str, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_FROM_BYTES", 0)
    mode = MODES["async" if way in OVERLAPPED else "sync"]
    with Splits(mode, VARIABLES) as rig:
        training = begin(rig, thread, 2, 12, way, transport)
        splits_and_moves(rig)
        accepted = sum(each.result(60) for each in training)
        check_values(rig, mode, 2, 12, accepted)


def request(group: int = 0, term: int = 3, shards: Sequence[int] = (1,)) -> pb.SplitGroupRequest:
    return pb.SplitGroupRequest(job="job", generation=1, group=group, term=term, shards=shards)


@pytest.mark.parametrize(
    ("call", "error", "problem"),
    [
        (request(shards=[]), errors.BadRequest, "name at least one shard"),
        (request(shards=[1, 1]), errors.BadRequest, "each only once"),
        (request(shards=range(6)), errors.BadRequest, "keeps its smallest shard, 0"),
        (request(shards=[1, 9]), errors.BadRequest, r"has no shards \[9\]"),
        (request(term=1), errors.Moved, "term 1 of lock group 0 is over"),
        (request(group=1, shards=[2]), errors.UnknownShard, "does not have lock group 1"),
    ],
    ids=str,
)
def test_a_split_that_cannot_be_made_is_refused(
    call: pb.SplitGroupRequest, error: type[errors.ShoalError], problem: str
) -> None:
    with Splits(consistency.Asynchronous()) as rig:
        rig.call(0, "DropBackup", pb.DropBackupRequest(job="job", generation=1, group=0, term=2))
        with pytest.raises(error, match=problem):
            rig.call(0, "SplitGroup", call)
        assert sorted(rig.groups()) == [0]


def test_groups_with_a_backup_or_a_clip_norm_are_not_split() -> None:
    with Splits(consistency.Asynchronous(), optimizer=optim.SGD(1.0, clip_norm=1.0)) as rig:
        with pytest.raises(errors.BadRequest, match="clip_norm"):
            rig.split(0, [1])
        backup = pb.Peer(server="server-1", address=rig.addresses[1])
        add = pb.AddBackupRequest(job="job", generation=1, group=0, term=2, backup=backup)
        wait_until(lambda: rig.call(0, "AddBackup", add).complete, what="the copy")
    with Splits(consistency.Asynchronous()) as rig:
        add.backup.address = rig.addresses[1]
        wait_until(lambda: rig.call(0, "AddBackup", add).complete, what="the copy")
        with pytest.raises(errors.BadRequest, match="has a backup; end it with DropBackup first"):
            rig.call(0, "SplitGroup", request())
        rig.call(0, "DropBackup", pb.DropBackupRequest(job="job", generation=1, group=0, term=3))
        rig.call(0, "SplitGroup", request(term=4))
        assert sorted(rig.groups()) == [0, 1]


def test_a_repeated_split_has_no_effect() -> None:
    with Splits(consistency.Synchronous()) as rig:
        rig.split(0, [3, 1])
        groups = rig.groups()
        rig.call(0, "SplitGroup", request(term=1, shards=[1, 3]))
        assert rig.groups() == groups
        assert {group.term for group in groups.values()} == {1}
        with pytest.raises(errors.Moved):
            rig.call(0, "SplitGroup", request(term=1, shards=[3]))


def test_a_split_waits_for_the_end_of_a_step_and_for_a_cut(thread: ThreadPoolExecutor) -> None:
    with Splits(consistency.Synchronous()) as rig:
        rig.admit("w0"), rig.admit("w1")
        with rig.worker("w0") as first, rig.worker("w1") as second:
            first.pull(), second.pull()
            first.push(ones(FEW))
            split = thread.submit(rig.split, 0, [2])
            assert not wait([split], 0.3).done, "the open step has a contribution"
            group = rig.groups()[0]
            group.commit_gate.hold(1)
            pushed = thread.submit(second.push, ones(FEW))
            assert not wait([split], 0.3).done, "a cut holds commits"
            assert not pushed.done()
            group.commit_gate.resume(1)
            assert pushed.result(20).outcome == "accepted"
            split.result(20)
        assert sorted(rig.groups()) == [0, 2]


@pytest.mark.parametrize("way", ["release", "cut", "commit"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_staged_push_counts_on_both_parts(mode: consistency.Consistency, way: str) -> None:
    """Another server has committed it, and its worker may be dead."""
    with Splits(mode) as rig:
        rig.admit("w0")
        stage_ones(rig.groups()[0])
        rig.split(0, [2, 5])
        for part in rig.groups().values():
            if way == "release":
                assert part.fence("w0", 1) == 0
                part.release("w0", 1, 1)
            elif way == "cut":
                for snapshot in part.cut({"w0": WorkerProgress(1, 1, 1)}).snapshots:
                    snapshot.end_saving()
            else:
                assert part.commit(Stamp("w0", 1, 0)).outcome == "accepted"
        np.testing.assert_array_equal(rig.values()["count"], np.ones(6))
        np.testing.assert_array_equal(rig.values()["small"], np.full(SMALL, -1))


@pytest.mark.parametrize("wire", [None, "float16"])
def test_slots_and_half_precision_have_the_bits_of_a_whole_group(wire: str | None) -> None:
    results = []
    for splits in (False, True):
        with Splits(consistency.Synchronous(), VARIABLES, optim.Adam(0.1), wire=wire) as rig:
            rig.admit("w0")
            with rig.worker("w0") as worker:
                for step in range(6):
                    values = worker.pull()
                    if splits and step == 3:
                        splits_and_moves(rig)
                    draw = np.random.default_rng(step)
                    gradients = {
                        name: draw.normal(size=it.shape).astype(np.float32) for name, it in ones(VARIABLES).items()
                    }
                    worker.push(gradients, updates={"count": np.arange(6)})
                results.append({name: array.tobytes() for name, array in worker.pull().items()})
            del values
    assert results[0] == results[1]


def test_readers_keep_what_they_read_and_follow(thread: ThreadPoolExecutor) -> None:
    with Splits(consistency.Asynchronous(), VARIABLES) as rig:
        rig.admit("w0")
        group = rig.groups()[0]
        reading = group.read(group.select(range(6)))
        with rig.worker("w0") as worker, rig.worker("") as reader:
            worker.pull()
            rig.split(0, [1, 4])
            worker.push(ones(VARIABLES))
            assert all(not values.any() for values in reading.values), "updates change what is being read"
            reading.end()
            np.testing.assert_array_equal(reader.pull()["large"], np.full(LARGE, -1))
            rig.move(1)
            worker.push(ones(VARIABLES))
            np.testing.assert_array_equal(reader.pull()["large"], np.full(LARGE, -2))


def test_a_caller_that_knows_an_earlier_grouping_is_sent_to_the_placement() -> None:
    with Splits(consistency.Asynchronous()) as rig:
        rig.admit("w0")
        old = rig.placement
        rig.split(0, [3])
        for shards in (range(6), [0, 3]):
            with pytest.raises(errors.Moved):
                rig.stores[0].hosted.group("job", 1, [*shards])
        rig.move(3)
        assert old.by_group().keys() == {0}
        with pytest.raises(errors.Moved):
            rig.stores[0].hosted.group("job", 1, [*range(6)]).select(range(6))
        with pytest.raises(errors.UnknownShard):
            rig.stores[0].hosted.group("job", 1, [3]).select([3])
        part = rig.stores[0].hosted.group("job", 1, [0, 1])
        with pytest.raises(errors.Moved):
            part.select([0, 1]).check_whole("push", part.term)
