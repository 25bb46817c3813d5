"""Lock groups with a backup that are split while workers train: two servers have each part all the time.

Server 0 has the primary, and server 1 the backup. The test plays the coordinator.
"""

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest

from shoal import consistency, errors, optim
from shoal._transport import Frame, shared_memory
from shoal.v1 import replica_pb2
from shoal_server.optimizers import compilation
from shoal_server.replication.parked_link import ParkedLink
from shoal_server.replication.part_link import PartLink
from shoal_server.shards import CopyState, Stamp
from support.clusters.shard_servers import RawLane
from support.clusters.split_servers import (
    AT_ONCE,
    FEW,
    MODES,
    SMALL,
    VARIABLES,
    ReplicatedSplits,
    begin,
    check_values,
    ones,
    stage_ones,
)
from support.waiting import wait_until


@pytest.mark.parametrize("way", AT_ONCE)
@pytest.mark.parametrize("name", MODES)
def test_no_acknowledged_push_is_lost_with_the_primary(name: str, way: str, thread: ThreadPoolExecutor) -> None:
    mode = MODES[name]
    with ReplicatedSplits(mode) as rig:
        training = begin(rig, thread, 3, 40, way)
        rig.split_both(0, [3, 5])
        assert [sorted(rig.groups(server)) for server in (0, 1)] == [[0, 3], [0, 3]]
        assert [group.follows for group in rig.groups(1).values()] == [True, True]
        rig.kill(0)
        rig.promote(0)
        rig.promote(3)
        accepted = sum(each.result(60) for each in training)
        check_values(rig, mode, 3, 40, accepted)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_large_groups_are_split_again_and_again(
    transport: str, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_memory, "SHARED_FROM_BYTES", 0)
    with ReplicatedSplits(MODES["async"], VARIABLES, optimizer=optim.SGD(1.0), transport=transport) as rig:
        training = begin(rig, thread, 2, 12, "buffers")
        rig.split_both(0, [1, 2, 4])
        rig.split_both(1, [2])
        rig.split_both(0, [3], keeps=2)
        accepted = sum(each.result(60) for each in training)
        check_values(rig, MODES["async"], 2, 12, accepted)
        assert [sorted(rig.groups(server)) for server in (0, 1)] == 2 * [[0, 1, 2, 3]]
        rig.check_same()


def test_slots_and_the_learning_rate_have_the_same_bits(thread: ThreadPoolExecutor) -> None:
    with ReplicatedSplits(MODES["sync"], VARIABLES, optimizer=optim.Adam(0.1)) as rig:
        rig.admit("w0")
        with rig.worker("w0") as worker:
            for step in range(6):
                worker.pull()
                if step == 3:
                    rig.split_both(0, [2, 4])
                draw = np.random.default_rng(step)
                worker.push({key: draw.normal(size=it.shape).astype(np.float32) for key, it in ones(VARIABLES).items()})
        rig.check_same()
        rig.kill(0)
        rig.promote(0)
        rig.promote(2)
        with rig.worker("w0", step=worker.step) as again:
            again.pull()
            assert again.push(ones(VARIABLES)).outcome == "accepted"


def test_both_parts_answer_a_repeated_push_as_the_first_one_was(thread: ThreadPoolExecutor) -> None:
    with ReplicatedSplits(MODES["sync"]) as rig:
        rig.admit("w0"), rig.admit("w1")
        with rig.worker("w0") as first, rig.worker("w1") as second:
            first.pull(), second.pull()
            pushed = thread.submit(second.push, ones(FEW))
            answers = [first.push(ones(FEW)).outcome, pushed.result(20).outcome]
        rig.split_both(0, [2, 5])
        rig.kill(0)
        rig.promote(0)
        rig.promote(2)
        with rig.worker("w0") as first, rig.worker("w1") as second:
            again = [worker.push(ones(FEW)).outcome for worker in (first, second)]
        assert again == answers == 2 * ["accepted"]
        np.testing.assert_array_equal(rig.values()["small"], np.full(SMALL, -1))


class TestTheOtherPart:
    """The coordinator promotes the part with the name of the group first, and does not know of the other one."""

    def test_becomes_a_primary_with_it(self, thread: ThreadPoolExecutor) -> None:
        with ReplicatedSplits(MODES["async"]) as rig:
            training = begin(rig, thread, 3, 40)
            rig.terms += 1
            rig.call(0, "SplitGroup", rig.request(0, [3, 5]))
            rig.kill(0)
            wait_until(lambda: rig.groups(1)[3].broken_replicas, what="a part without a primary")
            assert [(it.term, it.primary) for it in rig.groups(1)[3].broken_replicas] == [(2, False)]
            rig.promote(0, split_off=[3, 5])
            assert [group.follows for group in rig.groups(1).values()] == [False, False]
            with pytest.raises(errors.Moved):
                rig.stores[1].hosted.group("job", 1, [*range(6)])
            rig.split_alone(0, [3, 5], server=1, calls=2)  # a repetition has no effect
            accepted = sum(each.result(60) for each in training)
            assert {group.term for group in rig.groups(1).values()} == {rig.terms}
            check_values(rig, MODES["async"], 3, 40, accepted)

    def test_is_split_off_then_if_the_primary_died_before(self, thread: ThreadPoolExecutor) -> None:
        with ReplicatedSplits(MODES["async"]) as rig:
            training = begin(rig, thread, 3, 40)
            rig.kill(0)
            rig.terms += 1
            rig.promote(0, split_off=[3, 5])
            assert sorted(rig.groups(1)) == [0]
            rig.split_alone(0, [3, 5], server=1)
            accepted = sum(each.result(60) for each in training)
            check_values(rig, MODES["async"], 3, 40, accepted)

    def test_has_no_answer_of_the_old_primary_after_its_promotion(self, thread: ThreadPoolExecutor) -> None:
        with ReplicatedSplits(MODES["async"]) as rig:
            rig.admit("w0")
            rig.split_both(0, [3])
            old = rig.groups(0)
            rig.promote(0, split_off=[3])
            for number in (0, 3):
                wait_until(partial(getattr, old[number], "broken_replicas"), what="the end of the connection")
                stage_ones(old[number])
                waiting = old[number].confirmation(set())
                assert waiting
                assert waiting.waits


class TestTheBackup:
    def test_that_dies_leaves_both_parts_without_one(self, thread: ThreadPoolExecutor) -> None:
        with ReplicatedSplits(MODES["async"]) as rig:
            training = begin(rig, thread, 3, 40)
            rig.terms += 1
            rig.call(0, "SplitGroup", rig.request(0, [3, 5]))
            rig.kill(1)
            wait_until(lambda: all(it.broken_replicas for it in rig.groups().values()), what="two broken connections")
            assert [(it.group, it.term) for part in rig.groups().values() for it in part.broken_replicas] == [
                (0, 2),
                (3, 2),
            ]
            rig.drop_backup(0)
            rig.split_alone(0, [3, 5])
            accepted = sum(each.result(60) for each in training)
            check_values(rig, MODES["async"], 3, 40, accepted)

    def test_gets_new_copies_of_both_parts(self, thread: ThreadPoolExecutor) -> None:
        with ReplicatedSplits(MODES["async"]) as rig:
            training = begin(rig, thread, 2, 40)
            rig.split_both(0, [3, 5])
            rig.drop_backup(0)
            rig.drop_backup(3)
            rig.copy(0)
            rig.copy(3)
            accepted = sum(each.result(60) for each in training)
            check_values(rig, MODES["async"], 2, 40, accepted)
            rig.check_same()

    def test_of_another_term_is_not_kept(self) -> None:
        with ReplicatedSplits(MODES["async"]) as rig:
            rig.terms += 1
            with pytest.raises(errors.BadRequest, match="it has no backup of term 7"):
                rig.call(0, "SplitGroup", rig.request(0, [3], keeps=7))
            with pytest.raises(errors.BadRequest, match="has a backup; end it with DropBackup first"):
                rig.call(0, "SplitGroup", rig.request(0, [3], keeps=0))
            assert [sorted(rig.groups(server)) for server in (0, 1)] == [[0], [0]]

    def test_that_lacks_the_group_makes_the_split_fail(self) -> None:
        with ReplicatedSplits(MODES["async"]) as rig:
            rig.terms += 1
            rig.endpoints[1].stop()
            with pytest.raises(errors.BadRequest, match="cannot be split with its backup on server-1"):
                rig.call(0, "SplitGroup", rig.request(0, [3]))
            assert sorted(rig.groups()) == [0]


def held(call: Future[Any]) -> bool:
    return not wait([call], 0.2).done


def noted(monkeypatch: pytest.MonkeyPatch, kind: type, method: str, *, after: bool = False) -> list[Any]:
    """Returns the objects whose method is called, in the order of these calls; after them if they return."""
    called: list[Any] = []
    original = getattr(kind, method)

    def call(self: Any) -> Any:
        if not after:
            called.append(self)
        result = original(self)
        if after:
            called.append(self)
        return result

    monkeypatch.setattr(kind, method, call)
    return called


class TestTheMoment:
    def test_is_one_between_two_steps(self, thread: ThreadPoolExecutor) -> None:
        with ReplicatedSplits(consistency.Synchronous()) as rig:
            rig.admit("w0"), rig.admit("w1")
            with rig.worker("w0") as first, rig.worker("w1") as second:
                first.pull(), second.pull()
                first.push(ones(FEW))
                split = thread.submit(rig.split_both, 0, [2])
                assert held(split), "the open step has a contribution"
                pulled = thread.submit(first.pull)
                second.push(ones(FEW))
                split.result(20)
                np.testing.assert_array_equal(pulled.result(20)["small"], np.full(SMALL, -1))
                second.pull()
                pushed = thread.submit(first.push, ones(FEW))
                second.push(ones(FEW))
                assert pushed.result(20).outcome == "accepted"
            rig.check_same()

    @pytest.mark.parametrize("which", [0, 1])
    def test_does_not_come_if_a_connection_of_a_part_breaks_before(
        self, which: int, thread: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        senders, receivers = noted(monkeypatch, PartLink, "open", after=True), noted(monkeypatch, ParkedLink, "wait")
        with ReplicatedSplits(consistency.Synchronous()) as rig:
            rig.admit("w0"), rig.admit("w1")
            with rig.worker("w0") as first, rig.worker("w1") as second:
                first.pull(), second.pull()
                first.push(ones(FEW))
                split = thread.submit(rig.split_both, 0, [2])
                wait_until(lambda: len(senders) == 2, what="the connections of the parts")
                receivers[which].stop()  # they may have come in another order than they were opened
                ended = CopyState.ENDED
                wait_until(lambda: any(it.log.state is ended for it in senders), what="a broken connection")
                second.push(ones(FEW))
                with pytest.raises(errors.BadRequest, match="cannot be split with its backup: the connection"):
                    split.result(20)
                assert [sorted(rig.groups(server)) for server in (0, 1)] == [[0], [0]]
                first.pull(), second.pull()
                rig.call(0, "SplitGroup", rig.request(0, [2]))
                rig.publish_split(0, [2])
            rig.check_same()


def part_hello(rig: ReplicatedSplits, shards: Sequence[int] = (3,), **changed: Any) -> bytes:
    """Returns the hello with which server 0 opens the connection of a part."""
    group = rig.groups()[0]
    hello = replica_pb2.ReplicaHello(
        direction=replica_pb2.ReplicaHello.PART,
        job="job",
        generation=1,
        group=min(shards),
        term=2,
        server="server-0",
        incarnation=1,
        config=group.config.to_proto(it.layout for it in group.shards if it.layout.shard in shards),
        kernels=compilation.processor(),
    )
    for name, value in changed.items():
        setattr(hello, name, value)
    return hello.SerializeToString()


@pytest.mark.parametrize(
    ("changed", "error", "says"),
    [
        ({"server": "eve"}, errors.Moved, "no complete copy of lock group 0"),
        ({"incarnation": 2}, errors.Moved, "no complete copy of lock group 0"),
        ({"split_from": 1}, errors.Moved, "no complete copy of lock group 1"),
        ({"term": 0}, errors.Moved, "term 0 of lock group 0 is over"),
        ({"group": 2}, errors.BadRequest, "not that of lock group 2"),
        ({"kernels": "others"}, errors.UnequalKernels, "the kernels of server-0 are for others"),
    ],
    ids=str,
)
def test_a_connection_of_a_part_that_makes_no_sense_is_refused(
    changed: dict[str, Any], error: type[errors.ShoalError], says: str
) -> None:
    with ReplicatedSplits(MODES["async"]) as rig, rig.lane(1) as lane:
        lane.send(Frame.REPLICA, part_hello(rig, **changed))
        with pytest.raises(error, match=says):
            lane.answer(Frame.END)


def test_a_group_has_two_parked_connections_at_most_and_those_of_a_later_term_replace_them() -> None:
    with ReplicatedSplits(MODES["async"]) as rig, ExitStack() as opened:
        before = rig.open_lanes

        def park(**changed: Any) -> RawLane:
            lane = opened.enter_context(rig.lane(1))
            lane.send(Frame.REPLICA, part_hello(rig, **changed))
            lane.answer(Frame.END)
            return lane

        park(shards=[3])
        park(shards=[3])  # a repetition replaces the first
        park(shards=[0, 1, 2, 4, 5])
        with pytest.raises(errors.BadRequest, match="can only be split into two parts"):
            park(shards=[5])
        park(shards=[5], term=3)
        with pytest.raises(errors.Moved, match="there is a later split"):
            park(shards=[3])
        wait_until(lambda: rig.open_lanes == before + 1, what="the end of the others")
        rig.drop_backup(0)
        wait_until(lambda: rig.open_lanes == 0, what="the end of the parked connection")


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_staged_push_counts_on_both_parts_of_the_backup(mode: consistency.Consistency) -> None:
    """Another server has committed it, and its worker may be dead."""
    with ReplicatedSplits(mode) as rig:
        rig.admit("w0")
        stage_ones(rig.groups()[0])
        rig.split_both(0, [2, 5])
        rig.kill(0)
        rig.promote(0)
        rig.promote(2)
        for part in rig.groups(1).values():
            assert part.commit(Stamp("w0", 1, 0)).outcome == "accepted"
            assert part.commit(Stamp("w0", 1, 0)).outcome == "accepted"
        np.testing.assert_array_equal(rig.values()["count"], np.ones(6))
        np.testing.assert_array_equal(rig.values()["small"], np.full(SMALL, -1))
