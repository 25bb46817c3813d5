"""Effects about copies: the calls that they make to servers, and their outcomes."""

import queue
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest

from shoal import _rpc, errors
from shoal._security import CopyGrant
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import parameter_server_pb2_grpc
from shoal_coordinator.effects.copy_effects import MOST_REFUSALS, STALLED_S, add_backup
from shoal_coordinator.effects.effect_queues import queue_of
from shoal_coordinator.effects.effect_runner import EffectReport, EffectRunner
from shoal_coordinator.messages import (
    AddBackup,
    AdmitWorker,
    BackupFailed,
    BackupMade,
    DropBackup,
    DropCopy,
    GroupTold,
    JobRef,
    ProbeServer,
    Promote,
    ServerProbed,
    ServerRef,
    SplitGroup,
    events,
)
from shoal_coordinator.persistence.effect_codec import effect_from_proto, effect_to_proto
from support.clusters.coordinator_rig import Notes

A = JobRef("a", 1)
OTHER = ServerRef("s1", "127.0.0.1:9")


class Copying(Notes):
    """A server that completes a copy at the third call."""

    split_errors: ClassVar[list[errors.ShoalError]] = []
    replies = (pb.AddBackupReply(bytes=9), pb.AddBackupReply(copied_bytes=5, bytes=9), pb.AddBackupReply(complete=True))

    @_rpc.servicer
    def AddBackup(self, request: Any, context: Any) -> Any:
        self.note("AddBackup", request)
        return self.replies[min(len(self.of(pb.AddBackupRequest)), len(self.replies)) - 1]

    @_rpc.servicer
    def DropBackup(self, request: Any, context: Any) -> Any:
        self.note("DropBackup", request)
        return pb.DropBackupReply()

    @_rpc.servicer
    def DropCopy(self, request: Any, context: Any) -> Any:
        self.note("DropCopy", request)
        return pb.DropCopyReply()

    @_rpc.servicer
    def SplitGroup(self, request: Any, context: Any) -> Any:
        self.note("SplitGroup", request)
        if self.split_errors:
            raise self.split_errors.pop()
        return pb.SplitGroupReply()

    @_rpc.servicer
    def ResumeCommits(self, request: Any, context: Any) -> Any:
        self.note("ResumeCommits", request)
        return pb.ResumeCommitsReply()

    @_rpc.servicer
    def Promote(self, request: Any, context: Any) -> Any:
        self.note("Promote", request)
        return pb.PromoteReply(version=7)


class Host:
    """A coordinator that takes outcomes in."""

    def __init__(self) -> None:
        self.outcomes: queue.Queue[EffectReport] = queue.Queue()

    def report(self, outcome: EffectReport) -> None:
        self.outcomes.put(outcome)

    def report_all(self, outcomes: Any) -> None:
        for outcome in outcomes:
            self.report(outcome)

    def published(self, event: Any) -> bool:
        raise NotImplementedError

    def held(self, event: Any) -> Any:
        raise NotImplementedError

    def wanted(self, effect: int, server: ServerRef) -> bool:
        return True

    def is_live(self, job: JobRef) -> bool:
        return True

    def incarnation(self, server: ServerRef) -> int:
        return 1 if server == OTHER else 5


def grant_for(copy: CopyGrant, backup: str, incarnation: int) -> str:
    return f"{copy} for {backup} {incarnation}"


class Bench:
    """A server that takes notes, and a runner that calls it."""

    def __init__(self, stack: ExitStack) -> None:
        self.notes = Copying(step=3)  # type: ignore[abstract]
        add = parameter_server_pb2_grpc.add_ParameterServerServicer_to_server
        server = _rpc.RpcServer("127.0.0.1:0", [("shoal.v1.ParameterServer", add, self.notes)], threads=8)
        server.start()
        stack.callback(server.stop, 0.1)
        self.server, self.host = ServerRef("s0", server.address), Host()
        self.runner = EffectRunner(self.host, grant_for=grant_for)
        stack.callback(self.runner.stop)

    def run(self, effect: Any) -> Any:
        self.runner.submit([effect])
        return self.host.outcomes.get(timeout=30)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(stack)


@pytest.mark.parametrize("error", [errors.Overloaded("no moment"), errors.InternalError("no memory")])
def test_a_group_is_split_as_soon_as_its_server_can(bench: Bench, error: errors.ShoalError) -> None:
    bench.notes.split_errors.append(error)
    effect = SplitGroup(A, 4, 2, 7, bench.server, (5, 6), number=11)
    assert bench.run(effect) == GroupTold(A, 2, 7, effect=11)
    calls = bench.notes.of(pb.SplitGroupRequest)
    assert calls == 2 * [pb.SplitGroupRequest(job="a", generation=4, group=2, term=7, shards=[5, 6])]
    assert effect_from_proto(11, effect_to_proto(effect)) == effect


def test_a_group_is_split_with_its_backup(bench: Bench) -> None:
    bench.notes.split_errors.extend([errors.BadRequest("a connection broke")] * (MOST_REFUSALS - 1))
    effect = SplitGroup(A, 4, 2, 7, bench.server, (5, 6), 3, OTHER, number=11)
    assert bench.run(effect) == GroupTold(A, 2, 7, effect=11)
    grant = grant_for(CopyGrant("a", 4, 2, 7, "s0", 5), "s1", 1)
    asked = pb.SplitGroupRequest(job="a", generation=4, group=2, term=7, shards=[5, 6], keeps_term=3, grant=grant)
    assert bench.notes.of(pb.SplitGroupRequest) == MOST_REFUSALS * [asked]
    assert effect_from_proto(11, effect_to_proto(effect)) == effect


def test_a_backup_that_a_server_cannot_split_has_failed(bench: Bench) -> None:
    bench.notes.split_errors.extend([errors.BadRequest("end it with DropBackup first")] * MOST_REFUSALS)
    outcome = bench.run(SplitGroup(A, 4, 2, 7, bench.server, (5, 6), 3, OTHER, number=11))
    assert isinstance(outcome, BackupFailed)
    assert (outcome.group, outcome.term, outcome.effect) == (2, 7, 11)
    assert outcome.reason == "server s0 cannot split its shards with their backup: end it with DropBackup first"
    assert not bench.notes.split_errors


def test_a_new_primary_is_told_of_a_split_that_may_not_have_been_carried_out(bench: Bench) -> None:
    effect = Promote(A, 4, 2, 7, bench.server, split_off=(5, 6), number=11)
    assert bench.run(effect) == GroupTold(A, 2, 7, effect=11)
    [asked] = bench.notes.of(pb.PromoteRequest)
    assert [*asked.split_off] == [5, 6]
    assert effect_from_proto(11, effect_to_proto(effect)) == effect


def test_a_server_that_has_not_the_group_does_not_split_it(bench: Bench) -> None:
    bench.notes.split_errors.append(errors.Moved("it is elsewhere"))
    outcome = bench.run(SplitGroup(A, 4, 2, 7, bench.server, (5, 6), number=11))
    assert isinstance(outcome, events.EffectFailed)
    assert outcome.shards_lost


def test_a_copy_is_asked_for_until_it_is_complete(bench: Bench) -> None:
    effect = AddBackup(A, 4, 2, 7, bench.server, OTHER, number=11)
    assert bench.run(effect) == BackupMade(A, 2, 7, effect=11)
    calls = bench.notes.of(pb.AddBackupRequest)
    peer = pb.Peer(server="s1", address=OTHER.address)
    grant = grant_for(CopyGrant("a", 4, 2, 7, "s0", 5), "s1", 1)
    assert calls == [pb.AddBackupRequest(job="a", generation=4, group=2, term=7, backup=peer, grant=grant)] * 3


@pytest.mark.parametrize("error", [errors.UnequalKernels("other kernels"), errors.Moved("another term")])
def test_a_copy_that_a_server_refuses_has_failed(bench: Bench, error: errors.ShoalError) -> None:
    bench.notes.fails["AddBackup"] = error
    outcome = bench.run(AddBackup(A, 4, 2, 7, bench.server, OTHER, number=11))
    assert isinstance(outcome, BackupFailed)
    assert (outcome.group, outcome.term, outcome.effect) == (2, 7, 11)
    assert "from server s0 to s1 failed: " in outcome.reason
    assert error.message in outcome.reason


class Stuck:
    """Calls to a server that copies nothing."""

    def check_wanted(self, server: ServerRef) -> None:
        pass

    def call(self, server: ServerRef, method: str, request: Any) -> Any:
        return pb.AddBackupReply(copied_bytes=5, bytes=9)


def test_a_copy_that_gets_no_further_has_failed() -> None:
    now = 0.0

    def wait(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return False

    calls: Any = Stuck()
    outcome = add_backup(AddBackup(A, 4, 2, 7, OTHER, OTHER), calls, wait, lambda: now)
    assert isinstance(outcome, BackupFailed)
    assert "no byte arrived" in outcome.reason
    assert STALLED_S < now < STALLED_S + 2


def test_a_copy_ends_with_the_coordinator() -> None:
    calls: Any = Stuck()
    with pytest.raises(errors.Cancelled):
        add_backup(AddBackup(A, 4, 2, 7, OTHER, OTHER), calls, lambda _: True, lambda: 0.0)


@pytest.mark.parametrize(("kind", "request_of"), [(DropBackup, pb.DropBackupRequest), (Promote, pb.PromoteRequest)])
def test_a_decision_is_told_with_its_term(bench: Bench, kind: Any, request_of: Callable[..., Any]) -> None:
    assert bench.run(kind(A, 4, 2, 7, bench.server, number=11)) == GroupTold(A, 2, 7, effect=11)
    assert bench.notes.calls == [request_of(job="a", generation=4, group=2, term=7)]


def test_a_copy_is_freed_with_its_term(bench: Bench) -> None:
    assert bench.run(DropCopy(A, 4, 2, 7, bench.server, number=11)) == events.EffectDone(effect=11)
    assert bench.notes.calls == [pb.DropCopyRequest(job="a", generation=4, group=2, term=7)]


def test_a_job_goes_on_if_a_copy_cannot_be_freed(bench: Bench) -> None:
    bench.notes.fails["DropCopy"] = errors.Overloaded("too many calls")
    assert bench.run(DropCopy(A, 4, 2, 7, bench.server, number=11)) == events.EffectDone(effect=11)


@pytest.mark.parametrize("error", [errors.Moved("no complete copy"), errors.InternalError("its update failed")])
def test_a_server_that_cannot_promote_its_backup_has_lost_it(bench: Bench, error: errors.ShoalError) -> None:
    bench.notes.fails["Promote"] = error
    outcome = bench.run(Promote(A, 4, 2, 7, bench.server, number=11))
    assert isinstance(outcome, events.EffectFailed)
    assert outcome.shards_lost
    assert "the backup on server s0 could not become the primary" in outcome.reason


@pytest.mark.parametrize(
    ("error", "answers"),
    [
        (None, True),
        (errors.Overloaded("too many calls"), True),
        (errors.UnknownJob("a new process, without the job"), False),
        (errors.Unreachable("nobody there"), False),
    ],
)
def test_a_probe_asks_for_the_job(bench: Bench, error: errors.ShoalError | None, answers: bool) -> None:
    if error:
        bench.notes.fails["ResumeCommits"] = error
    outcome = bench.run(ProbeServer(A, bench.server, 3, 17.5, number=11))
    assert isinstance(outcome, ServerProbed)
    assert (outcome.server, outcome.incarnation, outcome.asked_at, outcome.effect) == (bench.server, 3, 17.5, 11)
    assert bool(outcome.silence) is not answers
    assert bench.notes.of(pb.ResumeCommitsRequest) == [pb.ResumeCommitsRequest(job="a")]


def test_a_dead_server_does_not_answer_a_probe(bench: Bench) -> None:
    assert bench.run(ProbeServer(A, OTHER, 3, 17.5, number=11)).silence


def test_workers_are_admitted_after_a_promotion() -> None:
    promotion = Promote(A, 4, 2, 7, OTHER)
    assert queue_of(promotion) == queue_of(AdmitWorker(A, "w", 1, 0, 1, ()))
    assert queue_of(promotion) != queue_of(DropBackup(A, 4, 2, 7, OTHER)), "a call that admits a worker may wait for it"
    assert queue_of(AddBackup(A, 4, 2, 7, OTHER, OTHER)) != queue_of(AddBackup(A, 4, 3, 7, OTHER, OTHER))
    assert queue_of(ProbeServer(A, OTHER, 1, 0.0)) != queue_of(promotion)


@pytest.mark.parametrize(
    "effect",
    [
        AddBackup(A, 4, 2, 7, OTHER, ServerRef("s2", "h:2"), number=5),
        DropBackup(A, 4, 2, 7, OTHER, number=5),
        DropCopy(A, 4, 2, 7, OTHER, number=5),
        Promote(A, 4, 2, 7, OTHER, number=5),
        ProbeServer(A, OTHER, 3, 17.5, number=5),
    ],
)
def test_effects_come_back_from_their_records(effect: Any) -> None:
    assert effect_from_proto(5, effect_to_proto(effect)) == effect
