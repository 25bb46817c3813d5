"""Join at a real coordinator: the call waits without a thread, ends when it should, and sends the placement once."""

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal import errors
from shoal._rpc import CoordinatorClient
from shoal._training.participant import Participant
from shoal.v1 import coordinator_pb2 as members
from shoal.v1 import job_pb2 as jobs
from shoal.variables import Variable
from shoal_coordinator.messages import events
from support.clusters.coordinator_rig import Rig, job
from support.run_lengths import size
from support.waiting import wait_until

WAIT_S = 30.0
# Sessions that wait at a time: many more than the rig's coordinator has threads.
WAITERS = size(40, 400)


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(store=str(tmp_path / "store.db"))
    yield rig
    rig.stop()


class Waiting:
    """A call of Join in progress, on its own channel."""

    def __init__(self, rig: Rig, worker: str, job: str = "a", **fields: Any) -> None:
        self.client = CoordinatorClient(rig.process.address, retry_for_s=10.0)
        fields.setdefault("wait_s", WAIT_S)
        fields.setdefault("assignment", rig.beat(worker).assignment)
        request = jobs.JoinRequest(job=job, worker=worker, incarnation=rig.lives[worker], **fields)
        self.abandoned = threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._reply = self._pool.submit(self._call, request)

    def _call(self, request: jobs.JoinRequest) -> jobs.JoinReply:
        with closing(self.client):
            return self.client.call(self.client.jobs.Join, request, timeout_s=2 * WAIT_S, abandon=self.abandoned.is_set)

    def reply(self) -> jobs.JoinReply:
        with self._pool:
            return self._reply.result(WAIT_S / 2)

    @property
    def done(self) -> bool:
        return self._reply.done()


def waiting(rig: Rig, count: int) -> None:
    wait_until(lambda: rig.process.coordinator.waiting_workers == count, what=f"{count} waiting workers")


def submit(rig: Rig, *workers: str) -> None:
    for name in workers:
        rig.register(members.WORKER, name)
    rig.submit(job(workers=len(workers)))
    rig.describe("a", workers[0])


def test_many_sessions_wait_and_nobody_else_does(rig: Rig) -> None:
    names = [f"x{number}" for number in range(WAITERS + 1)]
    for name in names:
        rig.register(members.SESSION, name)
    rig.submit(replace(job(workers=len(names)), program=""))
    for name in names:
        rig.describe("a", name)
    calls = [Waiting(rig, name) for name in names[:-1]]
    waiting(rig, WAITERS)
    assert len(rig.member_status()) == len(names) + 2, "an ordinary call gets its thread"
    last = rig.join("a", names[-1])
    replies = [call.reply() for call in calls]
    assert all(reply.ready for reply in replies)
    assert sorted(reply.rank for reply in replies) == list(range(WAITERS))
    assert {reply.placement.SerializeToString(deterministic=True) for reply in replies} == {
        last.placement.SerializeToString(deterministic=True)
    }
    waiting(rig, 0)


def test_a_reply_carries_the_placement_once(rig: Rig) -> None:
    submit(rig, "w0", "w1")
    over = Waiting(rig, "w0", wait_s=0.01).reply()
    assert not over.ready
    assert {field.name for field, _ in over.ListFields()} <= {"state", "step", "rank"}, "its time is over"
    assert over.state in (jobs.STARTING, jobs.PLACING)
    rig.join("a", "w1")
    entered = Waiting(rig, "w0").reply()
    assert (entered.ready, len(entered.placement.variables), entered.spec.name) == (True, 2, "a")
    assert entered.placement == rig.job("GetPlacement", job="a")
    again = Waiting(rig, "w0", generation=entered.placement.generation).reply()
    assert not again.HasField("placement")
    again.placement.CopyFrom(entered.placement)
    assert again == entered
    assert Waiting(rig, "w0", generation=entered.placement.generation + 1).reply().HasField("placement")


def check_wait_ends(rig: Rig, end: Callable[[], object]) -> Waiting:
    submit(rig, "w0", "w1")
    call = Waiting(rig, "w0")
    waiting(rig, 1)
    assert not call.done
    end()
    waiting(rig, 0)
    return call


def test_a_wait_ends_with_the_job(rig: Rig) -> None:
    assert check_wait_ends(rig, lambda: rig.job("Cancel", job="a")).reply().state == jobs.CANCELLED


def test_a_wait_ends_when_the_worker_leaves(rig: Rig) -> None:
    def leave() -> None:
        rig.silent.add("w0")
        request = members.LeaveRequest(member="w0", incarnation=rig.lives.pop("w0"))
        rig.client.call(rig.client.members.Leave, request)

    with pytest.raises(errors.Fenced):
        check_wait_ends(rig, leave).reply()


def test_a_wait_ends_when_its_caller_does_not_wait_any_more(rig: Rig) -> None:
    submit(rig, "w0", "w1")
    call = Waiting(rig, "w0")
    waiting(rig, 1)
    call.abandoned.set()
    waiting(rig, 0)
    with pytest.raises(errors.Cancelled, match="abandoned"):
        call.reply()


def test_a_wait_ends_with_its_connection(rig: Rig) -> None:
    submit(rig, "w0", "w1")
    call = Waiting(rig, "w0")
    waiting(rig, 1)
    call.client.close()
    waiting(rig, 0)
    with pytest.raises(errors.ShoalError):
        call.reply()


def test_a_second_call_of_a_worker_ends_the_first(rig: Rig) -> None:
    submit(rig, "w0", "w1")
    first = Waiting(rig, "w0")
    waiting(rig, 1)
    second = Waiting(rig, "w0")
    assert not first.reply().ready
    waiting(rig, 1)
    rig.join("a", "w1")
    assert second.reply().ready


def test_a_wait_survives_a_restart_of_the_coordinator(rig: Rig) -> None:
    submit(rig, "w0", "w1")
    with ThreadPoolExecutor(1) as pool, closing(CoordinatorClient(rig.process.address)) as client:
        participant = Participant(client, "a", "w0", rig.lives["w0"], rig.beat("w0").assignment)
        entered = pool.submit(participant.enter)
        waiting(rig, 1)
        rig.restart()
        waiting(rig, 1)
        rig.join("a", "w1")
        entered.result(WAIT_S).close()


def test_a_participant_that_waits_asks_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(rig, "w0", "w1")
    asked: list[object] = []
    coordinator = rig.process.coordinator
    handle = coordinator.handle

    def noted(event: Any, *more: Any) -> Any:
        if isinstance(event, events.JoinRequested):
            asked.append(event)
        return handle(event, *more)

    monkeypatch.setattr(coordinator, "handle", noted)
    stop, tick = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool, closing(CoordinatorClient(rig.process.address)) as client:
        participant = Participant(client, "a", "w0", rig.lives["w0"], rig.beat("w0").assignment)
        entered = pool.submit(participant.enter, stop.is_set)
        tick.wait(1.0)  # the time in which it would ask again
        found = len(asked)
        stop.set()
        with pytest.raises(errors.Cancelled, match="stopped waiting"):
            entered.result(WAIT_S)
    assert found <= 1
    wait_until(lambda: not getattr(coordinator, "waiting_workers", 0))


@pytest.mark.parametrize("wait_s", [-1.0, math.nan, math.inf, -math.inf])
def test_a_wait_that_is_no_time(rig: Rig, wait_s: float) -> None:
    submit(rig, "w0")
    with pytest.raises(errors.BadRequest, match="wait_s of Join is"):
        rig.job("Join", job="a", worker="w0", wait_s=wait_s)


def test_descriptions_are_compared_by_digest(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(rig, "w0", "w1", "w2")
    compared: list[object] = []
    equal = Variable.__eq__

    def noted(self: Variable, other: object) -> bool:
        compared.append(other)
        return equal(self, other)

    monkeypatch.setattr(Variable, "__eq__", noted)
    reordered = {"v": Variable((8, 4)), "w": Variable((8, 4))}
    for name in ("w1", "w2"):
        rig.describe("a", name, reordered)
    assert compared == []
    with pytest.raises(errors.InvalidJob, match="variable 'w' has shape"):
        rig.describe("a", "w1", {**reordered, "w": Variable((8, 5))})


def test_a_placement_is_encoded_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    submit(rig, "w0", "w1")
    wait_until(lambda: rig.job("Join", job="a", worker="w0").HasField("placement"))
    rig.join("a", "w1")
    encoded: list[str] = []
    to_proto = Variable.to_proto

    def noted(self: Variable, name: str) -> Any:
        encoded.append(name)
        return to_proto(self, name)

    monkeypatch.setattr(Variable, "to_proto", noted)
    for _ in range(3):
        assert len(rig.join("a", "w0").placement.variables) == 2
        assert len(rig.job("GetPlacement", job="a").variables) == 2
    assert encoded == []
