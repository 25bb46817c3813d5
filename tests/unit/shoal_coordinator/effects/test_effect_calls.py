"""Effects' calls to servers: workers share calls, servers are called in parallel, a hung server delays few calls."""

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal import _rpc, errors, optim
from shoal._checkpoint.catalogue import Catalogue
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import Manifest
from shoal._security import Credentials, PortCheck, token_in
from shoal._wire.placement import Placement
from shoal.checkpoint_policy import CheckpointChoice
from shoal.job import Job
from shoal.partitioners import FixedShards
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import parameter_server_pb2_grpc
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards
from shoal_coordinator.effects import effect_runner
from shoal_coordinator.effects.effect_runner import EffectReport, EffectRunner
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.effects.server_channels import ServerChannels
from shoal_coordinator.effects.storage_reads import StorageReads
from shoal_coordinator.messages import (
    AdmitWorker,
    CreateShards,
    DropShards,
    Effect,
    HoldResult,
    JobRef,
    RemoveWorker,
    ServerRef,
    events,
)
from support.clusters.coordinator_rig import Notes
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

A = JobRef("a", 1)


class Host:
    """A coordinator that takes outcomes in."""

    def __init__(self) -> None:
        self.outcomes: queue.Queue[EffectReport] = queue.Queue()
        self.together: list[int] = []  # how many outcomes came at a time
        self.gone: set[str] = set()
        self.abandoned: set[int] = set()  # effects

    def report(self, outcome: EffectReport) -> None:
        self.report_all([outcome])

    def report_all(self, outcomes: Sequence[EffectReport]) -> None:
        self.together.append(len(outcomes))
        for outcome in outcomes:
            self.outcomes.put(outcome)

    def published(self, event: events.CheckpointPublished) -> bool:
        raise NotImplementedError

    def held(self, event: events.CutHeld) -> HoldResult:
        raise NotImplementedError

    def wanted(self, effect: int, server: ServerRef) -> bool:
        return server.member not in self.gone and effect not in self.abandoned

    def is_live(self, job: JobRef) -> bool:
        return job.name not in self.gone

    def incarnation(self, server: ServerRef) -> int:
        return 0 if server.member in self.gone else 1

    def take(self, count: int) -> list[EffectReport]:
        return [self.outcomes.get(timeout=30) for _ in range(count)]


class Group:
    """Servers that take notes, and a runner that calls them."""

    def __init__(self, count: int, folder: Path) -> None:
        self._stack = ExitStack()
        self.notes = [Notes(step) for step in range(count)]  # type: ignore[abstract]
        self.servers = tuple(self._start(f"s{number}", notes) for number, notes in enumerate(self.notes))
        self.host = Host()
        self.storage = Unanswering(folder)
        self.now = 0.0
        reads = StorageReads(60.0, lambda: self.now)
        self.runner = EffectRunner(self.host, storage=self.storage, reads=reads)
        self._stack.callback(self.runner.stop)
        self._stack.callback(self.let_go)

    def _start(self, name: str, notes: Notes) -> ServerRef:
        add = parameter_server_pb2_grpc.add_ParameterServerServicer_to_server
        server = _rpc.RpcServer("127.0.0.1:0", [("shoal.v1.ParameterServer", add, notes)], threads=64)
        server.start()
        self._stack.callback(server.stop, 0.1)
        return ServerRef(name, server.address)

    def let_go(self) -> None:
        """Everything that hangs goes on."""
        self.storage.answers.set()
        for notes in self.notes:
            for held in notes.holds.values():
                held.set()

    def close(self) -> None:
        self._stack.close()


class Unanswering(LocalStorage):
    """A storage that does not answer until it is told to."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.answers, self.asked = threading.Event(), threading.Event()

    def open(self, path: Sequence[str]) -> Any:
        self.asked.set()
        assert self.answers.wait(60)
        return super().open(path)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Callable[[int], Group]]:
    with ExitStack() as stack:
        yield lambda count: stack.enter_context(closing(Group(count, tmp_path)))


def admits(group: Group, worker: int, *, job: JobRef = A) -> AdmitWorker:
    return AdmitWorker(job, f"w{worker}", 1, worker, 100 + worker, group.servers, number=1 + worker)


def removes(group: Group, worker: int, *, job: JobRef = A) -> RemoveWorker:
    return RemoveWorker(job, f"w{worker}", 1, group.servers, number=1 + worker)


def creates(
    group: Group,
    *sources: CheckpointChoice,
    job: JobRef = A,
    number: int = 1,
    optimizer: optim.Optimizer = optim.SGD(0.1),  # noqa: B008 - it is immutable
) -> CreateShards:
    variables = {"w": Variable((64,), partitioner=FixedShards(len(group.servers)))}
    candidates = [Candidate(server.member, server.address, 0) for server in group.servers]
    shards = assign_shards(plan_shards(variables, len(group.servers)), candidates)
    spec = Job("m:f", name=job.name, optimizer=optimizer)
    return CreateShards(job, Placement(job.name, 1, variables, shards), spec, sources, number=number)


@pytest.mark.parametrize("clip_norm", [0.0, 1.0])
def test_servers_know_each_other_only_if_they_share_norms(group: Callable[[int], Group], clip_norm: float) -> None:
    there = group(3)
    there.runner.submit([creates(there, optimizer=optim.SGD(0.1, clip_norm=clip_norm))])
    there.host.take(1)
    for server, notes in zip(there.servers, there.notes, strict=True):
        (request,) = notes.of(pb.CreateShardsRequest)
        peers = [(it.member, it.address) for it in there.servers if it != server] if clip_norm else []
        assert [(peer.server, peer.address) for peer in request.peers] == peers


def test_workers_that_enter_meanwhile_share_a_call(group: Callable[[int], Group]) -> None:
    there = group(2)
    held = there.notes[1].holds["AdmitWorkers"] = threading.Event()
    there.runner.submit([admits(there, 0)])
    wait_until(lambda: there.notes[1].calls, what="the first call")
    there.runner.submit([admits(there, worker) for worker in range(1, 50)])
    held.set()
    admitted = there.host.take(50)
    assert admitted == [events.WorkerAdmitted(A, 100 + it, 1, effect=1 + it) for it in range(50)], "the largest step"
    assert there.host.together == [1, 49]
    for notes in there.notes:
        assert [len(request.workers) for request in notes.of(pb.AdmitWorkersRequest)] == [1, 49]


def test_workers_that_leave_together_are_fenced_on_all_servers_before_any_is_released(
    group: Callable[[int], Group],
) -> None:
    there = group(3)
    there.runner.submit([removes(there, worker) for worker in range(20)])
    outcomes = there.host.take(40)
    assert {it.committed_steps for it in outcomes if isinstance(it, events.WorkerFenced)} == {2}
    assert [type(it) for it in outcomes[-1:]] == [events.EffectDone]
    for notes in there.notes:
        kinds = [type(call) for call in notes.calls]
        assert kinds[:1] == [pb.FenceWorkersRequest]
        assert len(kinds) <= 4, "two calls for the first, and two for those that came meanwhile"
        released = [it for request in notes.of(pb.ReleaseWorkersRequest) for it in request.workers]
        assert {(it.worker, it.committed_steps) for it in released} == {(f"w{it}", 2) for it in range(20)}


@pytest.mark.parametrize("method", ["CreateShards", "AdmitWorkers", "FenceWorkers", "ReleaseWorkers", "DropShards"])
def test_all_servers_are_called_at_a_time(group: Callable[[int], Group], method: str) -> None:
    there = group(4)
    for notes in there.notes:
        notes.holds[method] = threading.Event()
    effects: dict[str, Effect] = {
        "CreateShards": creates(there),
        "AdmitWorkers": admits(there, 0),
        "DropShards": DropShards(A, there.servers, number=1),
    }
    there.runner.submit([effects.get(method, removes(there, 0))])
    kind = getattr(pb, f"{method}Request")
    wait_until(lambda: all(notes.of(kind) for notes in there.notes), what="a call to each, though none has answered")
    there.let_go()
    there.host.take(1)


def test_an_abandoned_effect_calls_no_server(group: Callable[[int], Group]) -> None:
    """The job restarts: in its earlier shards, a lost worker may still have the rank of the one that enters."""
    there = group(2)
    there.host.abandoned.add(7)
    admission = AdmitWorker(JobRef("b", 2), "w", 1, 0, 1, there.servers, number=7)
    there.runner.submit([admission, replace(admission, number=9, job=JobRef("c", 3))])
    outcomes = {outcome.effect: outcome for outcome in there.host.take(2)}
    assert isinstance(outcomes[7], events.EffectFailed)
    assert isinstance(outcomes[9], events.WorkerAdmitted)
    assert {request.job for notes in there.notes for request in notes.of(pb.AdmitWorkersRequest)} == {"c"}


def test_a_server_that_hangs_delays_only_what_needs_it(
    group: Callable[[int], Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(effect_runner, "PATIENCE_S", 0.2)
    there = group(2)
    hung, sound = there.servers
    there.notes[0].holds["AdmitWorkers"] = threading.Event()
    waiting = [AdmitWorker(JobRef(f"j{it}", it), "w", 1, 0, it, (hung,), number=it) for it in range(10, 30)]
    there.runner.submit(waiting)
    there.runner.submit([RemoveWorker(A, "w0", 1, (sound,), number=1)])
    outcomes = there.host.take(2)
    assert outcomes == [events.WorkerFenced(1, 1), events.EffectDone(effect=1)]
    there.let_go()
    assert {it.effect for it in there.host.take(20) if isinstance(it, events.WorkerAdmitted)} == {*range(10, 30)}


def test_a_removal_that_waits_for_a_server_does_not_ask_again_how_far_the_worker_was(
    group: Callable[[int], Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that has released the worker would say 0, and the worker's last push would count on some servers."""
    monkeypatch.setattr(effect_runner, "PATIENCE_S", 0.2)
    there = group(2)
    there.notes[0].holds["ReleaseWorkers"] = threading.Event()
    there.runner.submit([removes(there, 0)])
    wait_until(lambda: len(there.notes[0].of(pb.ReleaseWorkersRequest)) > 1, what="the second attempt")
    there.let_go()
    assert there.host.take(2) == [events.WorkerFenced(1, 1), events.EffectDone(effect=1)]
    for notes in there.notes:
        assert len(notes.of(pb.FenceWorkersRequest)) == 1
        assert {it.workers[0].committed_steps for it in notes.of(pb.ReleaseWorkersRequest)} == {1}


def test_restores_of_other_jobs_do_not_delay_the_removal_of_a_worker(group: Callable[[int], Group]) -> None:
    there = group(1)
    jobs = [JobRef(f"j{number}", number) for number in range(10, 30)]
    choice = CheckpointChoice("old", 1)
    there.runner.submit([creates(there, choice, job=job, number=job.submission) for job in jobs])
    there.runner.submit([removes(there, 0)])
    assert there.host.take(2) == [events.WorkerFenced(1, 0), events.EffectDone(effect=1)]


def test_a_server_that_is_gone_ends_the_calls_to_it_at_once(group: Callable[[int], Group]) -> None:
    there = group(2)
    there.notes[0].holds["AdmitWorkers"] = threading.Event()
    there.runner.submit([admits(there, 0)])
    wait_until(lambda: there.notes[0].calls, what="the call")
    there.host.gone.add("s0")
    [failed] = there.host.take(1)
    assert isinstance(failed, events.EffectFailed)
    assert failed.shards_lost
    there.runner.submit([DropShards(A, there.servers, number=2)])
    assert there.host.take(1) == [events.EffectDone(effect=2)]
    assert there.notes[1].of(pb.DropShardsRequest), "the other one is asked all the same"


def test_a_restore_ends_with_its_job(group: Callable[[int], Group]) -> None:
    """Its shards are dropped next, and nobody waits for a storage that hangs."""
    there = group(2)
    there.storage.answers.set()
    Catalogue(there.storage).publish(Manifest("old", 1, 0.0, 0, 0, {}, (), ()))
    there.notes[1].holds["Restore"] = threading.Event()
    there.runner.submit([creates(there, CheckpointChoice("old", 1)), DropShards(A, there.servers, number=2)])
    wait_until(lambda: there.notes[1].of(pb.RestoreRequest), what="the restore")
    there.host.gone.add("a")
    failed, dropped = there.host.take(2)
    assert isinstance(failed, events.EffectFailed)
    assert dropped == events.EffectDone(effect=2)
    assert there.notes[1].of(pb.DropShardsRequest)


def test_a_manifest_that_is_not_read_in_time_defers_the_restore(group: Callable[[int], Group]) -> None:
    """The thread is then free, and the job may try again."""
    there = group(1)
    there.runner.submit([creates(there, CheckpointChoice("old", 1))])
    assert there.storage.asked.wait(30)
    there.now = 61.0
    [deferred] = there.host.take(1)
    assert isinstance(deferred, events.RestoreDeferred)
    where = f"{there.storage.url}/old/00000001"
    assert f"did not return the manifest of {where} within 60 s" in deferred.reason
    there.runner.submit([creates(there, CheckpointChoice("old", 1), number=2)])
    [again] = there.host.take(1)
    assert isinstance(again, events.RestoreDeferred)
    assert f"an earlier access to the manifest of {where} for job a hangs" in again.reason


def test_a_restore_whose_manifest_is_not_read_ends_with_its_job(group: Callable[[int], Group]) -> None:
    there = group(1)
    there.runner.submit([creates(there, CheckpointChoice("old", 1)), DropShards(A, there.servers, number=2)])
    assert there.storage.asked.wait(30)
    there.host.gone.add("a")
    failed, dropped = there.host.take(2)
    assert isinstance(failed, events.EffectFailed)
    assert dropped == events.EffectDone(effect=2)


def test_the_calls_to_a_server_have_the_credentials_for_it_alone(group: Callable[[int], Group]) -> None:
    servers = group(2).servers
    with closing(
        ServerChannels(lambda _: 1, credentials_for=lambda member: Credentials(token=lambda: f"for-{member}"))
    ) as channels:
        found = {server.member: token_in(channels.metadata(server)) for server in servers}
        assert found == {server.member: f"for-{server.member}" for server in servers}


def test_a_call_waits_until_no_other_user_listens_on_the_port(
    group: Callable[[int], Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    [server] = group(1).servers
    there = [frozenset({os.geteuid() + 1}), frozenset({os.geteuid() + 1}), frozenset({os.geteuid()})]
    tokens: list[str] = []

    def token() -> str:
        tokens.append("secret")
        return tokens[-1]

    def port_check(_: Credentials, address: str) -> PortCheck:
        return PortCheck(address, listeners=lambda _host, _port: there.pop(0))

    monkeypatch.setattr(Credentials, "port_check", port_check)
    retries: list[None] = []
    with closing(ServerChannels(lambda _: 1, credentials_for=lambda _: Credentials(token=token))) as channels:
        calls = ServerCalls(channels, lambda _: True, lambda: retries.append(None))
        calls.call(server, "DropShards", pb.DropShardsRequest(job="a"))
    assert (there, len(retries)) == ([], 2)
    assert len(tokens) == 3, "each attempt reads the token, and checks the port, once"


def test_calls_to_all_servers_at_once_present_no_token_to_another_user(
    group: Callable[[int], Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user may take a port after the channels were made. `send` then still calls the other servers."""
    servers = group(2).servers
    taken = int(servers[0].address.rpartition(":")[2])

    def port_check(_: Credentials, address: str) -> PortCheck:
        return PortCheck(address, listeners=lambda _host, port: frozenset({os.geteuid() + (port == taken)}))

    sent: list[str] = []

    def presented_to(member: str) -> Credentials:
        def token() -> str:
            sent.append(member)
            return "secret"

        return Credentials(token=token)

    with closing(ServerChannels(lambda _: 1, credentials_for=presented_to)) as channels:
        calls = ServerCalls(channels, lambda _: True)
        with calls.concurrently(servers) as concurrent:
            monkeypatch.setattr(Credentials, "port_check", port_check)
            with pytest.raises(errors.Unreachable, match="The token was not sent"):
                concurrent.call("ResumeCommits", pb.ResumeCommitsRequest(job="a"))
            sent.clear()
            concurrent.send("ResumeCommits", pb.ResumeCommitsRequest(job="a"), timeout_s=5)
            assert sent == [server.member for server in servers]


def test_a_channel_lasts_as_long_as_its_servers_incarnation(group: Callable[[int], Group]) -> None:
    there = group(3)
    lives = dict.fromkeys(there.servers, 1)
    first, second, third = there.servers
    with closing(ServerChannels(lambda server: lives.get(server, 0), most=2)) as channels:
        calls = ServerCalls(channels, lambda server: server in lives)
        lent = channels.borrow(first)
        channels.give_back(lent)
        calls.call(first, "DropShards", pb.DropShardsRequest())
        again = channels.borrow(first)
        assert again is lent, "kept"
        lives[first] = 2
        assert channels.borrow(first) is not lent, "another incarnation"
        with pytest.raises(errors.Cancelled), _rpc.as_shoal_errors("it"):
            lent.stub.DropShards(pb.DropShardsRequest())
        for server in (second, third):
            calls.call(server, "DropShards", pb.DropShardsRequest())
        assert len(channels) == 2, "the limit; the one in use stays"
        del lives[third]
        channels.keep_only(lives)
        assert len(channels) == 1
        with pytest.raises(errors.Cancelled, match=r"s2 at .* is gone"):
            calls.call(third, "DropShards", pb.DropShardsRequest())


def test_a_worker_that_is_not_admitted_keeps_no_other_out() -> None:
    with ShardServers({"w": Variable((4,))}) as servers:
        servers.remove("fenced")
        workers = [
            pb.WorkerAdmission(worker=name, incarnation=1, rank=rank) for rank, name in enumerate(("a", "fenced", "b"))
        ]
        request = pb.AdmitWorkersRequest(job="job", workers=workers)
        for _ in range(2):  # a repetition changes nothing
            [reply] = servers.each("AdmitWorkers", request)
            assert [it.error.code for it in reply.results] == ["", "FENCED", ""]
        fences = [pb.WorkerFence(worker="a", incarnation=1)] * 1025
        with pytest.raises(errors.BadRequest, match="names 1025 workers; the limit CALL_WORKERS is 1024"):
            servers.each("FenceWorkers", pb.FenceWorkersRequest(job="job", workers=fences))


@pytest.mark.parametrize(
    ("name", "said"),
    [("w" * 3_000_000, "has 3000000 bytes; the limit FIELD_BYTES is 256"), ("a\x1b[2J", "has control characters")],
    ids=["long", "controls"],
)
def test_a_server_remembers_no_hostile_name(name: str, said: str) -> None:
    with ShardServers({"w": Variable((4,))}) as servers:
        admits = pb.AdmitWorkersRequest(job="job", workers=[pb.WorkerAdmission(worker=name, incarnation=1)])
        fences = pb.FenceWorkersRequest(job="job", workers=[pb.WorkerFence(worker=name, incarnation=1)])
        releases = pb.ReleaseWorkersRequest(job="job", workers=[pb.WorkerRelease(worker=name, incarnation=1)])
        for method, request in (("AdmitWorkers", admits), ("FenceWorkers", fences), ("ReleaseWorkers", releases)):
            with pytest.raises(errors.BadRequest, match=f"the name of a worker .*{said}"):
                servers.each(method, request)
        creation = pb.CreateShardsRequest(job=name, generation=1, optimizer=optim.SGD(0.1).to_proto())
        with pytest.raises(errors.BadRequest, match=f"the name of the job .*{said}"):
            servers.each("CreateShards", creation)
        assert servers.stores[0].load()[0] == len(servers.placement.shards)
