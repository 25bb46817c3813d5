"""What real clients do for the recordings of the wire, and the real servers and coordinator that they do it to.

Each scenario takes addresses alone, so it runs against taps before real servers, or against `Players`. Whatever would
differ from run to run is passed in: names, processes, the coordinator's clock and id. `pinned_draws` fixes what clients
draw. Values and gradients are small whole numbers and rates are powers of 2, so any processor computes the same bits.
"""

import json
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np

from shoal import errors, optim
from shoal._checkpoint.folders import open_folder
from shoal._rpc import RpcServer, channel
from shoal._rpc.coordinator import CoordinatorClient, Membership
from shoal._system.host import host_id
from shoal._training.parameters import ParameterClient
from shoal._training.participant import DataRange, Participant, Report
from shoal._wire.cursor import Cursor
from shoal._wire.layout import Placement
from shoal.checkpoint_policy import CheckpointPolicy
from shoal.client import Client
from shoal.consistency import Asynchronous, Consistency, Synchronous
from shoal.evaluation_policy import EvaluationPolicy
from shoal.initializers import Constant
from shoal.job import Job
from shoal.partitioners import FixedShards
from shoal.status import Evaluation, StepTiming
from shoal.v1 import coordinator_pb2, coordinator_pb2_grpc, header_pb2, job_pb2, job_pb2_grpc
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub
from shoal.variables import Variable
from shoal_coordinator.api import CoordinatorService, JobsService
from shoal_coordinator.cluster import Candidate, ClusterPolicy, assign_shards, plan_shards
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.persistence import open_store
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

# When the coordinator's clock begins: seconds of Unix time.
BEGINNING = 1_700_000_000.0
MIXED = {
    "kernel": Variable((6, 4), initializer=Constant(2.0), partitioner=FixedShards(2)),
    "bias": Variable((4,)),
    "wide": Variable((3,), dtype="float64"),
    "half": Variable((5,), dtype="bfloat16"),
    "mean": Variable((4,), trainable=False, aggregation="mean"),
    "count": Variable((), dtype="int64", trainable=False, aggregation="sum"),
    "last": Variable((2,), trainable=False, aggregation="last"),
}
TRAINED = ("kernel", "bias", "wide", "half")
MOMENTUM = optim.Momentum(0.5, momentum=0.5)


def whole_numbers(names: Mapping[str, Variable] | tuple[str, ...], first: int = 1) -> dict[str, np.ndarray]:
    """An array for each of these variables of `MIXED`, of numbers that every dtype holds."""
    arrays = {}
    for place, name in enumerate(names):
        variable = MIXED[name]
        size = int(np.prod(variable.shape, dtype=int))
        numbers = (np.arange(size) + first + place) % 16
        arrays[name] = numbers.reshape(variable.shape).astype(variable.dtype)
    return arrays


def updates(first: int) -> dict[str, np.ndarray]:
    """What a push brings for the variables that no optimizer changes."""
    return whole_numbers(("mean", "count", "last"), first)


@contextmanager
def pinned_draws(byte: str = "5a") -> Iterator[None]:
    """Has clients draw the same tokens and process names each time: this byte, again and again."""
    with mock.patch.object(secrets, "token_hex", lambda nbytes=32: byte * nbytes):
        yield


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    """The files of the checkpoint that `a_cluster` takes, by name, in their comparable form.

    The manifest's is without the time of the cut, the version of Shoal and the checksum, and has the entries of
    protobuf's maps in order. The text itself has to be laid out as this function lays it out.
    """
    files = {path.name: path.read_bytes() for path in sorted((folder / "first" / "00000001").iterdir())}
    record = json.loads(files["manifest.json"])

    def text() -> bytes:
        return (json.dumps(record, indent=1, ensure_ascii=False) + "\n").encode()

    assert files["manifest.json"] == text(), "a manifest is laid out in another way"
    for name in ("created_at", "writer", "sum"):
        assert record[name]
        record[name] = 0
    _sort_maps(record)
    return {**files, "manifest.json": text()}


def _sort_maps(value: object, name: str = "") -> None:
    if isinstance(value, list):
        for item in value:
            _sort_maps(item)
    elif isinstance(value, dict):
        if name in ("hyperparameters", "parameters", "values", "staleness", "done", "held", "ranks", "told"):
            entries = sorted(value.items())
            value.clear()
            value.update(entries)
        for inner, item in value.items():
            _sort_maps(item, inner)


def fixed_names() -> dict[str | bytes, str | bytes]:
    """What stands in every recording for the version of Shoal and this machine."""
    return {version("shoal"): "version", host_id(): "host"}


# Servers and the coordinator.


@contextmanager
def bare_servers(count: int, checkpoints: Path | None = None) -> Iterator[ShardServers]:
    """Parameter servers, without the shards of any scenario."""
    with ShardServers({"other": Variable((1,))}, servers=count, shards=1, checkpoints=checkpoints) as servers:
        yield servers


@dataclass
class Clock:
    """A clock that goes on when it is told to."""

    now: float = BEGINNING

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class PinnedCoordinator:
    """A coordinator whose id and clock are given; `with` ends it.

    Args:
        store: path of its store, or "memory".
        checkpoints: its folder of them.
        clock: gives the time.
    """

    def __init__(self, store: str, checkpoints: Path | str, clock: Clock) -> None:
        policy = ClusterPolicy(lease_s=1000.0, checkpoints=True)
        folder = open_folder(str(checkpoints))
        self._stack = ExitStack()
        kept = open_store(store)
        self._stack.callback(kept.close)
        self.coordinator = Coordinator(kept, "reef", policy, clock=clock, folder=folder)
        members = CoordinatorService(self.coordinator, lease_s=1000.0, heartbeat_s=100.0)
        jobs = JobsService(self.coordinator, folder)
        self._stack.callback(jobs.close)
        services: list[tuple[str, Callable[[Any, Any], None], Any]] = [
            ("shoal.v1.Coordinator", coordinator_pb2_grpc.add_CoordinatorServicer_to_server, members),
            ("shoal.v1.Jobs", job_pb2_grpc.add_JobsServicer_to_server, jobs),
        ]
        server = RpcServer("127.0.0.1:0", services, threads=8)
        self._stack.callback(server.stop, 0.1)
        self._stack.callback(self.coordinator.stop)
        self.coordinator.start()
        server.start()
        self.address = server.address

    def settle(self) -> None:
        """Waits until all that was decided is done."""
        wait_until(lambda: not self._outstanding(), what="the end of what the coordinator decided")

    def _outstanding(self) -> bool:
        with self.coordinator.reading() as (machine, _):
            return bool(machine.outstanding)

    def __enter__(self) -> "PinnedCoordinator":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextmanager
def pinned_cluster(folder: Path, store: str = "memory") -> Iterator[tuple[PinnedCoordinator, ShardServers, Clock]]:
    """A coordinator and two servers, which are no members yet, with one folder of checkpoints."""
    clock = Clock()
    with bare_servers(2, folder) as servers, PinnedCoordinator(store, folder, clock) as coordinator:
        yield coordinator, servers, clock


# What scenarios are given.


@dataclass
class Wire:
    """Where clients call, and what they do between two calls.

    Attributes:
        addresses: by name: "server-0", "server-1", "coordinator".
        mark: says that what was begun has ended.
        advance: has the coordinator's clock go on.
    """

    addresses: Mapping[str, str]
    mark: Callable[[], None] = lambda: None
    advance: Callable[[float], None] = lambda _: None
    stack: ExitStack = field(default_factory=ExitStack)

    def stubs(self, count: int) -> list[ParameterServerStub]:
        """Of the first servers, as the coordinator has them."""
        channels = [self.stack.enter_context(channel(self.addresses[f"server-{index}"])) for index in range(count)]
        return [ParameterServerStub(it) for it in channels]

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()


class JobOnServers:
    """A job's shards on some servers, with calls as the coordinator and workers make them."""

    def __init__(
        self,
        wire: Wire,
        name: str,
        variables: Mapping[str, Variable],
        *,
        servers: int,
        shards: int,
        mode: Consistency,
        transport: str,
        wire_dtype: type | None = None,
    ) -> None:
        self.wire, self.name, self._variables, self._transport, self._mode = wire, name, variables, transport, mode
        candidates = [Candidate(f"server-{it}", wire.addresses[f"server-{it}"], 0) for it in range(servers)]
        layouts = plan_shards(variables, shards, np.dtype(wire_dtype) if wire_dtype else None)
        self.placement = Placement(name, 1, dict(variables), assign_shards(layouts, candidates))
        self.stubs = wire.stubs(servers)

    def create(self) -> None:
        by_address = self.placement.by_server()
        for index, stub in enumerate(self.stubs):
            stub.CreateShards(
                pb.CreateShardsRequest(
                    job=self.name,
                    epoch=1,
                    variables=[variable.to_proto(name) for name, variable in self._variables.items()],
                    shards=[it.layout.to_proto() for it in by_address[self.wire.addresses[f"server-{index}"]]],
                    optimizer=MOMENTUM.to_proto(),
                    consistency=self._mode.to_proto(),
                    seed=3,
                )
            )
        self.wire.mark()

    def each(self, method: str, request: object) -> list[Any]:
        replies = [getattr(stub, method)(request) for stub in self.stubs]
        self.wire.mark()
        return replies

    def admit(self, worker: str, rank: int) -> None:
        self.each("AdmitWorker", pb.AdmitWorkerRequest(job=self.name, worker=worker, incarnation=1, rank=rank))

    @contextmanager
    def client(self, worker: str = "", *, epoch: int = 1) -> Iterator[ParameterClient]:
        placement = Placement(self.name, epoch, self.placement.variables, self.placement.shards)
        with ParameterClient(
            placement,
            worker=worker,
            incarnation=1 if worker else 0,
            refresh=lambda: placement,
            retry_for_s=0.0,
            transport=self._transport,
        ) as client:
            yield client
            self.wire.mark()


@contextmanager
def refused(kind: type[errors.ShoalError]) -> Iterator[None]:
    """The block ends with this error."""
    try:
        yield
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


# Scenarios.


def two_servers(wire: Wire) -> None:
    """Two phases over two servers by gRPC, all dtypes and aggregations, refusals, a checkpoint's calls, the end."""
    job = JobOnServers(wire, "two", MIXED, servers=2, shards=3, mode=Asynchronous(), transport="grpc")
    job.create()
    with job.client() as reader:
        reader.assign(whole_numbers(MIXED))
        wire.mark()
    job.admit("a", 0)
    with job.client("a") as a:
        a.pull()
        wire.mark()
        a.barrier()
        wire.mark()
        a.push(whole_numbers(TRAINED, 3), updates=updates(4), weight=2.0, cursor=Cursor(lease=3, consumed=16))
        wire.mark()
        a.step = 0
        a.push(whole_numbers(TRAINED, 9), updates=updates(9), weight=2.0)
        wire.mark()
        a.pull()
        wire.mark()
        with refused(errors.NonFiniteGradient):
            bad = whole_numbers(TRAINED, 3)
            bad["kernel"][0, 1] = np.nan
            a.push(bad)
        wire.mark()
        a.skip()
        wire.mark()
        a.push(whole_numbers(TRAINED, 2))
        wire.mark()
    with job.client("a", epoch=9) as stale, refused(errors.StaleEpoch):
        stale.push(whole_numbers(TRAINED, 2))
    with job.client("stranger") as stranger, refused(errors.Fenced):
        stranger.pull()
    stamp = header_pb2.Stamp(job="two", worker="a", incarnation=1, step=9, epoch=1)
    for index, stub in enumerate(job.stubs):
        shards = [it.layout.shard for it in job.placement.by_server()[wire.addresses[f"server-{index}"]]]
        with suppress(Exception):  # it is not staged
            stub.Commit(pb.CommitRequest(stamp=stamp, shards=shards))
    wire.mark()
    held = job.each("Hold", pb.HoldRequest(job="two", epoch=1, cut=7))
    workers = [worker for reply in held[:1] for worker in reply.workers]
    job.each("Save", pb.SaveRequest(job="two", epoch=1, cut=7, number=1, workers=workers))
    job.each("CollectFiles", pb.CollectFilesRequest(job="two", number=1, within_s=10))
    job.each("Hold", pb.HoldRequest(job="two", epoch=1, cut=8))
    job.each("GiveUpHold", pb.GiveUpHoldRequest(job="two", cut=8))
    fenced = job.each("FenceWorker", pb.FenceWorkerRequest(job="two", worker="a", incarnation=1))
    committed = max(reply.committed_steps for reply in fenced)
    release = pb.ReleaseWorkerRequest(job="two", worker="a", incarnation=1, committed_steps=committed)
    job.each("ReleaseWorker", release)
    with job.client("a") as late, refused(errors.Fenced):
        late.push(whole_numbers(TRAINED, 2))
    job.each("DropShards", pb.DropShardsRequest(job="two"))
    with job.client() as reader, refused(errors.UnknownJob):
        reader.pull()


def halves(wire: Wire) -> None:
    """Values and gradients that travel as bfloat16, synchronously, by two workers on one server, by gRPC."""
    job = JobOnServers(
        wire,
        "halves",
        MIXED,
        servers=1,
        shards=2,
        mode=Synchronous(),
        transport="grpc",
        wire_dtype=ml_dtypes.bfloat16,
    )
    job.create()
    job.admit("a", 0)
    job.admit("b", 1)
    with job.client("a") as a, job.client("b") as b:
        for step in range(2):
            for rank, worker in enumerate((a, b)):
                worker.pull()
                # Weights whose shares are halves, so that the mean is exact.
                worker.push(whole_numbers(TRAINED, 1 + 4 * step + 2 * rank), updates=updates(2 * step + 2), weight=4.0)
        a.pull()
    job.each("DropShards", pb.DropShardsRequest(job="halves"))


def lanes(wire: Wire) -> None:
    """Pull, push in two phases, commit and refusals over lanes to two servers, without shared memory."""
    job = JobOnServers(wire, "lanes", MIXED, servers=2, shards=3, mode=Asynchronous(), transport="tcp")
    job.create()
    job.admit("a", 0)
    with job.client("a") as a:
        a.pull()
        wire.mark()
        a.push(whole_numbers(TRAINED, 3), updates=updates(4), cursor=Cursor(lease=1, consumed=8))
        wire.mark()
        a.step = 0
        a.push(whole_numbers(TRAINED, 7))  # the first answer counts
        wire.mark()
        a.barrier()
        wire.mark()
        with refused(errors.NonFiniteGradient):
            bad = whole_numbers(TRAINED, 3)
            bad["wide"][2] = np.inf
            a.push(bad)
        wire.mark()
        a.skip()
        wire.mark()
        a.pull()
        wire.mark()


def one_lane(wire: Wire) -> None:
    """Pushes with their commit in one call, over a lane to one server, as bfloat16."""
    job = JobOnServers(
        wire,
        "one",
        MIXED,
        servers=1,
        shards=2,
        mode=Asynchronous(),
        transport="tcp",
        wire_dtype=ml_dtypes.bfloat16,
    )
    job.create()
    job.admit("a", 0)
    with job.client("a") as a:
        for step in range(2):
            a.pull()
            a.push(whole_numbers(TRAINED, step + 1), updates=updates(2))
        a.pull()


def shared_memory(wire: Wire) -> None:
    """Pull and push through slots of memory that both sides share."""
    variables = {"kernel": Variable((1 << 16,), initializer=Constant(2.0)), "bias": Variable((16,))}
    job = JobOnServers(wire, "shared", variables, servers=1, shards=2, mode=Asynchronous(), transport="auto")
    job.create()
    job.admit("a", 0)
    with job.client("a") as a:
        for step in range(2):
            values = a.pull()
            a.push({name: np.full_like(value, step + 1) for name, value in values.items()})
            del values
        a.pull()


GIVEN = {"kernel": whole_numbers(MIXED)["kernel"]}
"""Initial values that the program brings."""


class Worker:
    """A worker of the cluster, as its daemon and its trainer are one; `with` has it leave."""

    def __init__(self, coordinator: CoordinatorClient, name: str) -> None:
        self._replies: list[coordinator_pb2.HeartbeatReply] = []
        self._heard = threading.Semaphore(0)
        self._coordinator = coordinator
        self.name = name
        request = coordinator_pb2.RegisterRequest(role=coordinator_pb2.WORKER, member=name, device="cpu")
        with pinned_draws():
            self.membership = Membership(coordinator, request, on_reply=self._take)

    def _take(self, reply: coordinator_pb2.HeartbeatReply) -> None:
        self._replies.append(reply)
        self._heard.release()

    def _wait(self) -> coordinator_pb2.HeartbeatReply:
        assert self._heard.acquire(timeout=20), "no heartbeat was answered"
        return self._replies[-1]

    def beat(self) -> coordinator_pb2.HeartbeatReply:
        """Sends one heartbeat."""
        self.membership.beat_now()
        return self._wait()

    def part(self, job: str) -> Participant:
        """Its part in a job, which the coordinator has given it."""
        reply = self.beat()
        assert reply.job == job, f"{self.name} is to work on {reply.job!r}"
        incarnation = self.membership.incarnation
        return Participant(self._coordinator, job, self.name, incarnation, reply.assignment, sleep=lambda _: None)

    def __enter__(self) -> "Worker":
        self.membership.start()
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.membership.stop()


def register_server(coordinator: CoordinatorClient, name: str, address: str) -> int:
    """Has a server be a member: its incarnation."""
    request = coordinator_pb2.RegisterRequest(
        role=coordinator_pb2.SERVER,
        member=name,
        address=address,
        process=f"process-of-{name}",
        metrics_address="127.0.0.1:9",
        version=version("shoal"),
    )
    return coordinator.call(coordinator.members.Register, request).incarnation


def register_worker(coordinator: CoordinatorClient, name: str) -> int:
    """Has a worker be a member, without a thread that beats: its incarnation."""
    request = coordinator_pb2.RegisterRequest(
        role=coordinator_pb2.WORKER, member=name, device="cpu", process=f"process-of-{name}"
    )
    return coordinator.call(coordinator.members.Register, request).incarnation


def part_of(coordinator: CoordinatorClient, name: str, incarnation: int, sleep: Callable[[], object]) -> Participant:
    """The part in a job that the coordinator has given a worker."""
    request = coordinator_pb2.HeartbeatRequest(member=name, incarnation=incarnation)
    reply = coordinator.call(coordinator.members.Heartbeat, request)
    assert reply.job, f"{name} has no part in a job"
    return Participant(coordinator, reply.job, name, incarnation, reply.assignment, sleep=lambda _: sleep())


def beat_of_server(coordinator: CoordinatorClient, name: str, incarnation: int) -> None:
    """A heartbeat with what a server holds and does."""
    load = coordinator_pb2.ServerLoad(updates=3, received_bytes=1 << 20, sent_bytes=1 << 33, waiting_pulls=1)
    request = coordinator_pb2.HeartbeatRequest(member=name, incarnation=incarnation, shards=2, bytes=480, load=load)
    coordinator.call(coordinator.members.Heartbeat, request)


def job_of(name: str, **options: Any) -> Job:
    """A job of one worker, whose numbers are exact."""
    fixed: dict[str, Any] = {
        "consistency": Asynchronous(),
        "optimizer": MOMENTUM,
        "settings": {"hidden": 64},
        "epochs": 2,
        "batch_size": 8,
        "range_size": 16,
        "shards": 3,
        "seed": 5,
        "overlap": False,
        "checkpoints": CheckpointPolicy(every_s=0.0, at_end=False, keep_last=3),
    }
    return Job("programs:linear", name=name, **{**fixed, **options})


def report_of(step: int, *, log: tuple[str, ...] = ()) -> Report:
    """A report of one step."""
    timing = StepTiming(step, BEGINNING + step, pull=0.25, read=0.125, compute=0.5, push=0.0625)
    return Report(
        step=step,
        accepted=1,
        samples=8,
        values={"loss": 1.0 / (1 << step), "accuracy": 0.5},
        staleness={0: 1},
        log=log,
        timings=(timing,),
    )


def take_checkpoint(coordinator: CoordinatorClient, job: str) -> None:
    """Asks for one."""
    coordinator.call(coordinator.jobs.TakeCheckpoint, job_pb2.TakeCheckpointRequest(job=job))


def a_cluster(wire: Wire) -> None:
    """The life of a job with data, evaluations and checkpoints; a job that goes on from it and fails; one cancelled."""
    with ExitStack() as stack, mock.patch.dict(os.environ, SHOAL_TRANSPORT="grpc"):
        client = stack.enter_context(Client(wire.addresses["coordinator"], retry_for_s=0.0))
        coordinator = CoordinatorClient(wire.addresses["coordinator"], retry_for_s=0.0)
        stack.callback(coordinator.close)
        lives = {}
        for name in ("server-0", "server-1"):
            lives[name] = register_server(coordinator, name, wire.addresses[name])
            beat_of_server(coordinator, name, lives[name])
        worker = stack.enter_context(Worker(coordinator, "w0"))
        _first_job(wire, client, coordinator, worker)
        _later_jobs(wire, client, worker)
        request = coordinator_pb2.DrainRequest(member="server-1", incarnation=lives["server-1"])
        coordinator.call(coordinator.members.Drain, request)
        client.status()


def _first_job(wire: Wire, client: Client, coordinator: CoordinatorClient, worker: Worker) -> None:
    evaluation = EvaluationPolicy(every_steps=2, at_end=False, metric="loss", patience=3)
    with pinned_draws():
        job = client.submit(job_of("first", evaluation=evaluation))
        client.submit(job_of("first", evaluation=evaluation))  # the token is the same: the first one's answer
    with pinned_draws("6b"), refused(errors.JobExists):
        client.submit(job_of("first"))
    with refused(errors.NotPlaced):
        take_checkpoint(coordinator, "first")
    part = worker.part("first")
    assert part.spec.seed == 5
    part.describe({**MIXED, **GIVEN}, examples=64)
    wire.advance(2.0)
    with part.enter() as training:
        for step in range(3):
            leased = part.lease(done=step)
            assert isinstance(leased, DataRange)
            values = training.pull()
            assert (step, values["kernel"].shape) == (step, (6, 4))
            cursor = Cursor(leased.lease, 8)
            training.push(whole_numbers(TRAINED, step + 1), updates=updates(step), weight=8.0, cursor=cursor)
            wire.mark()
            wire.advance(0.5)
            part.report(report_of(step + 1, log=(f"step {step} is done",)))
            turn = part.ask_evaluation(step + 1)
            if turn.number:
                found = Evaluation(turn.number, step + 1, {"loss": 0.25, "accuracy": 0.75}, examples=16, seconds=1.5)
                part.report_evaluation(found)
            if step == 1:
                take_checkpoint(coordinator, "first")
        beat_of_server(coordinator, "server-0", 1)
        job.status(), client.jobs(), job.data(), job.timings(last=2), client.status()
        with refused(errors.JobRunning):
            job.drop()
        assert isinstance(leased, DataRange)
        last = leased.lease
        while isinstance(another := part.lease(done=last), DataRange):
            last = another.lease
    part.finish()
    wire.advance(1.0)
    job.result()
    list(job.events(follow=False))


def _later_jobs(wire: Wire, client: Client, worker: Worker) -> None:
    with pinned_draws():
        again = client.submit(job_of("again", restore="first/1"))
    part = worker.part("again")
    part.describe({**MIXED, **GIVEN}, examples=64)
    with part.enter() as training:
        training.pull()
        wire.mark()
    part.finish("Traceback: the program has failed")
    assert part.failure()
    list(again.events(follow=False))
    with pinned_draws():
        waiting = client.submit(job_of("waiting", workers=2, min_workers=2))
    waiting.cancel()
    list(waiting.events(follow=False))
    waiting.drop()
    again.drop()
    with refused(errors.UnknownJob):
        client.job("nobody").status()


ON_SERVERS: Mapping[str, tuple[Callable[[Wire], None], int]] = {
    "two-servers": (two_servers, 2),
    "halves": (halves, 1),
    "lanes": (lanes, 2),
    "one-lane": (one_lane, 1),
    "shared-memory": (shared_memory, 1),
}
"""By name of the recording: what clients do to parameter servers, and how many there are."""
