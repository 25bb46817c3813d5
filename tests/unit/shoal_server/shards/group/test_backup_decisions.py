"""A lock group and its backup, without a connection: late decisions, copies that fail to begin, and answers on hold."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from shoal import consistency, errors, initializers, optim
from shoal._wire.layout import ArenaLayout, ShardLayout, Slice
from shoal.variables import Variable
from shoal_server.shards import store as store_module
from shoal_server.shards.group import group_shell, input_log
from shoal_server.shards.group.call_wait import CallWait
from shoal_server.shards.group.input_log import CopyState, InputLog
from shoal_server.shards.group.lock_group import LockGroup
from shoal_server.shards.machine.state import GroupState
from shoal_server.shards.store import ShardStore
from shoal_server.shards.values.shard import JobShardConfig, Stamp
from support.waiting import wait_until

SPEC = Variable((2,), initializer=initializers.Zeros())
LAYOUT = ShardLayout(0, (ArenaLayout(SPEC.dtype, SPEC.aggregation, (Slice("v", 0, 2, 0),), 2),))
CONFIG = JobShardConfig("job", 1, {"v": SPEC}, optim.SGD(1.0), consistency.Synchronous(), 0)


class Sender:
    """Takes inputs, and sends nothing. A gradient is only sent while `reads` is set."""

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        self.sent, self.forgotten = 0, list[int]()
        self.reads, self.sending = threading.Event(), threading.Event()
        self.reads.set()

    def gradient(self, payload: Any) -> int:
        self.sending.set()
        assert self.reads.wait(20)
        return self.next_gradient()

    def begin_gradient(self, payload: Any, sent: Any) -> Any:
        sent(self.next_gradient())
        return bool

    def add(self, number: int, event: Any, gradient: int) -> None:
        self.inputs.append((number, type(event).__name__, gradient))

    def next_gradient(self) -> int:
        self.sent += 1
        return self.sent

    def forget(self, gradient: int) -> None:
        self.forgotten.append(gradient)

    def add_hash(self, values_hash: int) -> None: ...
    def flush(self) -> None: ...
    def flush_at_once(self) -> None: ...
    def ticket(self, ticket: object) -> int:
        return 1

    def close(self) -> None: ...


class Rig:
    """A primary with workers "a" and "b", and logs for backups."""

    def __init__(self) -> None:
        self.group = LockGroup(CONFIG, [LAYOUT])
        for rank, worker in enumerate("ab"):
            self.group.admit(worker, 1, rank)

    def log(self, term: int) -> InputLog:
        return InputLog("job", term, "server-1", Sender())

    def begin(self, log: InputLog) -> None:
        self.group.begin_copy(log).end()

    def complete(self, term: int) -> InputLog:
        log = self.log(term)
        self.begin(log)
        log.copied(0)
        return log

    def stage(self, worker: str, step: int = 0) -> None:
        self.group.stage(Stamp(worker, 1, step), 1.0, 0, {0: np.ones(2, np.float32)})

    def push(self, worker: str, step: int = 0) -> str:
        self.stage(worker, step)
        return self.group.commit(Stamp(worker, 1, step)).outcome


@pytest.fixture
def rig() -> Rig:
    return Rig()


def pending_copy(rig: Rig, log: InputLog, pool: ThreadPoolExecutor) -> Any:
    """Begins a copy that waits, because the open step has a contribution."""
    rig.push("a")
    begun = pool.submit(rig.begin, log)
    wait_until(lambda: rig.group.term == log.term, what="a copy that waits")
    return begun


def test_a_copy_that_waits_never_begins_once_the_primary_is_alone(rig: Rig) -> None:
    with ThreadPoolExecutor(1) as pool:
        begun = pending_copy(rig, rig.log(1), pool)
        rig.group.end_copy(2)
        with pytest.raises(errors.Moved, match="the copy of term 1 is not wanted"):
            begun.result(5)
    rig.push("b")
    assert not rig.group.logs, "a backup that the coordinator does not know, for which answers would wait forever"


def test_a_late_decision_does_not_end_a_copy_that_waits(rig: Rig) -> None:
    with ThreadPoolExecutor(1) as pool:
        log = rig.log(3)
        begun = pending_copy(rig, log, pool)
        rig.group.end_copy(2)
        rig.push("b")
        begun.result(5)
    assert rig.group.logs == [log]


def test_a_repeated_decision_gives_no_answer_that_waits_for_a_backup(rig: Rig) -> None:
    log = rig.complete(1)
    log.fail("the connection broke")
    with pytest.raises(errors.Moved, match="had a complete backup in term 1"):
        rig.begin(rig.log(1))
    states = [log.state]
    rig.begin(rig.log(3))
    assert [*states, log.state] == [CopyState.BROKEN, CopyState.ENDED]


def test_a_copy_that_cannot_begin_fails_no_push(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: object) -> None:
        raise MemoryError

    with ThreadPoolExecutor(1) as pool:
        begun = pending_copy(rig, rig.log(1), pool)
        monkeypatch.setattr(GroupState, "write_to", failing)
        assert rig.push("b") == "accepted"
        with pytest.raises(errors.InternalError, match="the copy could not begin: MemoryError"):
            begun.result(5)
    assert rig.push("a", 1) == "accepted"


def test_values_are_not_overwritten_while_there_is_a_backup() -> None:
    group = LockGroup(CONFIG, [LAYOUT])
    log = InputLog("job", 1, "server-1", Sender())
    group.begin_copy(log).end()
    shards = group.select([0])
    values = {slab: np.ones(2, np.float32) for slab in shards.layout.slabs}
    with pytest.raises(errors.BadRequest, match="has a backup; values can only be overwritten before that"):
        group.assign(shards, values)
    with pytest.raises(errors.BadRequest, match="has a backup"):
        group.restore(3, 3, lambda _: None)
    assert log.number == 0
    group.end_copy(2)
    group.assign(shards, values)
    assert group.shards[0].arenas[0].values.tolist() == [1, 1]


def test_a_cut_that_is_not_told_leaves_no_snapshot(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.complete(1)
    monkeypatch.setattr(input_log, "COPY_WAIT_S", 0.05)
    with pytest.raises(errors.Moved):
        rig.group.cut({})
    rig.group.end_copy(2)
    place = rig.group.shards[0].arenas[0].values.ctypes.data
    rig.push("a"), rig.push("b")
    assert rig.group.shards[0].arenas[0].values.tolist() == [-1, -1]
    assert rig.group.shards[0].arenas[0].values.ctypes.data == place, "an update left the values to a snapshot"


def test_a_gradient_is_never_sent_with_the_lock_of_the_group(rig: Rig) -> None:
    """Another copy begins after a push has looked for the log, and that backup's server does not read."""
    sender = Sender()
    sender.reads.clear()
    log = InputLog("job", 3, "server-1", sender)

    class Earlier(InputLog):
        def send_gradient(self, payload: Any) -> None:
            rig.group.end_copy(2)
            rig.begin(log)

    rig.begin(Earlier("job", 1, "server-1", Sender()))
    with ThreadPoolExecutor(2) as pool:
        staged = pool.submit(rig.stage, "a")
        assert sender.sending.wait(5)
        try:
            assert pool.submit(rig.group.answer_to, Stamp("b", 1, 0)).result(2) is None
        finally:
            sender.reads.set()
        staged.result(5)
    assert sender.inputs == [(1, "PushStaged", 1)]
    assert not sender.forgotten


def test_an_empty_backup_is_not_promoted_and_a_full_one_not_replaced_in_its_term(rig: Rig) -> None:
    store = ShardStore()
    backup = store.add_backup(CONFIG, [LAYOUT], 1)
    with pytest.raises(errors.Moved, match="no complete copy of lock group 0"):
        backup.promote(2)
    start = rig.group.begin_copy(rig.log(1))
    start.end()
    backup.load(start.state, lambda _: {})
    with pytest.raises(errors.Moved, match="has a complete copy of lock group 0 at term 1 already"):
        store.add_backup(CONFIG, [LAYOUT], 1)
    assert backup.promote(2) == 0


def test_a_backup_that_is_dropped_while_another_is_made_stays_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    store = ShardStore()
    first = store.add_backup(CONFIG, [LAYOUT], 1)
    second = ShardLayout(1, LAYOUT.arenas)
    dropping = list[threading.Thread]()

    def made(*args: Any, **options: Any) -> LockGroup:
        thread = threading.Thread(target=store.drop_backup, args=(first,))
        thread.start()
        thread.join(0.2)  # it waits, or would drop the backup from what is replaced next
        dropping.append(thread)
        return LockGroup(*args, **options)

    monkeypatch.setattr(store_module, "LockGroup", made)
    kept = store.add_backup(CONFIG, [second], 1)
    dropping[0].join(5)
    assert store.hosted.all() == [kept]


class Waiting:
    """Collects the ends of waits."""

    def __init__(self) -> None:
        self.waits = set[CallWait]()
        self.ends = 0

    def end(self) -> None:
        self.ends += 1


def test_an_answer_waits_until_the_backup_has_its_inputs(rig: Rig) -> None:
    assert rig.group.confirmation(set()) is None, "there is no backup"
    log, waiting = rig.complete(1), Waiting()
    rig.push("a")
    first = rig.group.confirmation(waiting.waits)
    rig.push("b")
    second = rig.group.confirmation(waiting.waits)
    assert first
    assert second
    assert waiting.waits == {first, second}
    first.on_end(waiting.end)
    log.copied(2)
    assert [first.waits, second.waits, waiting.ends] == [False, True, 1]
    first.check()
    assert waiting.waits == {second}
    log.copied(log.number)
    assert not second.waits
    second.on_end(waiting.end)
    assert waiting.ends == 2
    assert rig.group.confirmation(waiting.waits) is None


def test_a_withdrawn_or_late_answer_is_forgotten(rig: Rig) -> None:
    log, waiting = rig.complete(1), Waiting()
    rig.push("a")
    gone, late, kept = (rig.group.confirmation(waiting.waits) for _ in range(3))
    assert gone
    assert late
    assert kept
    before = log.waiting
    gone.withdraw()
    late.expire(time.monotonic())
    assert late.waits, "not yet"
    late.expire(time.monotonic() + input_log.COPY_WAIT_S)
    assert log.waiting == before - 2
    assert waiting.waits == {kept}
    with pytest.raises(errors.Moved, match="the backup on server-1 has not confirmed the call"):
        late.check()
    log.copied(log.number)
    with pytest.raises(errors.Moved):
        late.check()
    kept.check()


def test_a_closed_group_refuses_answers(rig: Rig) -> None:
    rig.complete(1)
    rig.push("a")
    waiting = rig.group.confirmation(set())
    rig.group.close()
    assert waiting
    assert not waiting.waits
    with pytest.raises(errors.Moved):
        waiting.check()
    with pytest.raises(errors.Moved):
        rig.group.confirmation(set())


class LateSender(Sender):
    """Sends gradients when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.late: list[Callable[[int], object]] = []

    def begin_gradient(self, payload: Any, sent: Any) -> Any:
        self.late.append(sent)
        return lambda: self.late.remove(sent) if sent in self.late else None


@pytest.mark.parametrize("begun", [False, True])
def test_a_gradient_that_is_withdrawn_is_not_staged_by_another_push(rig: Rig, *, begun: bool) -> None:
    sender = LateSender()
    log = InputLog("job", 1, "server-1", sender)
    rig.begin(log)
    log.copied(0)
    payload = {0: np.ones(2, np.float32)}
    sending = rig.group.send_gradient(payload, set())
    assert sending
    assert sending.waits
    sent = sender.late.pop() if begun else None
    sending.withdraw()
    assert not sender.late
    if sent:
        sent(7)
        assert sender.forgotten == [7]
    assert log.lacks_gradient(payload)


def test_a_push_whose_gradient_was_sent_is_staged(rig: Rig) -> None:
    sender = LateSender()
    log = InputLog("job", 1, "server-1", sender)
    rig.begin(log)
    log.copied(0)
    payload = {0: np.ones(2, np.float32)}
    sending = rig.group.send_gradient(payload, set())
    assert sending
    sender.late.pop()(7)
    sending.check()
    rig.group.stage(Stamp("a", 1, 0), 1.0, 0, payload)
    assert sender.inputs == [(1, "PushStaged", 7)]
    assert rig.group.send_gradient(payload, set()), "the next push with these arrays"


def test_workers_wait_while_the_backup_is_too_far_behind(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_shell, "MAX_BACKLOG", 2)
    log = rig.complete(1)
    rig.push("a")
    with pytest.raises(errors.Overloaded, match="the backup on server-1 has not confirmed 2 inputs"):
        rig.stage("b")
    log.copied(log.number)
    rig.push("b")


def test_inputs_that_tell_nobody_anything_leave_no_answers(rig: Rig) -> None:
    log = rig.complete(1)
    rig.stage("a")
    assert log.backlog == 1
    assert not log.waiting
