"""Scenarios of the wire recordings in which real clients call parameter servers.

Each scenario gets nothing but addresses. They may belong to taps, which record and pass on calls to real servers, or to
`Players`, which replay a recording.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ml_dtypes
import numpy as np

from shoal import errors
from shoal._training.parameters import ParameterClient
from shoal._wire.cursor import Cursor
from shoal._wire.placement import Placement
from shoal.consistency import Asynchronous, Consistency, Synchronous
from shoal.initializers import Constant
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards
from support.recordings.mixed_variables import MIXED, MOMENTUM, TRAINED, updates, whole_numbers
from support.recordings.wire import Wire, refused


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
                    generation=1,
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
        admission = pb.WorkerAdmission(worker=worker, incarnation=1, rank=rank)
        self.each("AdmitWorkers", pb.AdmitWorkersRequest(job=self.name, workers=[admission]))

    @contextmanager
    def client(self, worker: str = "", *, generation: int = 1) -> Iterator[ParameterClient]:
        placement = Placement(self.name, generation, self.placement.variables, self.placement.shards)
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


def two_servers(wire: Wire) -> None:
    """Pushes in two phases to two servers by gRPC: all dtypes and aggregations, refusals, a checkpoint, the end."""
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
    with job.client("a", generation=9) as stale, refused(errors.StaleGeneration):
        stale.push(whole_numbers(TRAINED, 2))
    with job.client("stranger") as stranger, refused(errors.Fenced):
        stranger.pull()
    stamp = header_pb2.Stamp(job="two", worker="a", incarnation=1, step=9, generation=1)
    for index, stub in enumerate(job.stubs):
        shards = [it.layout.shard for it in job.placement.by_server()[wire.addresses[f"server-{index}"]]]
        with suppress(Exception):  # it is not staged
            stub.Commit(pb.CommitRequest(stamp=stamp, shards=shards))
    wire.mark()
    held = job.each("HoldCommits", pb.HoldCommitsRequest(job="two", generation=1, cut=7))
    workers = [worker for reply in held[:1] for worker in reply.workers]
    job.each("Save", pb.SaveRequest(job="two", generation=1, cut=7, number=1, workers=workers))
    job.each("CollectFiles", pb.CollectFilesRequest(job="two", number=1, within_s=10))
    job.each("HoldCommits", pb.HoldCommitsRequest(job="two", generation=1, cut=8))
    job.each("ResumeCommits", pb.ResumeCommitsRequest(job="two", cut=8))
    fence = pb.WorkerFence(worker="a", incarnation=1)
    fenced = job.each("FenceWorkers", pb.FenceWorkersRequest(job="two", workers=[fence]))
    committed = max(steps for reply in fenced for steps in reply.committed_steps)
    release = pb.WorkerRelease(worker="a", incarnation=1, committed_steps=committed)
    job.each("ReleaseWorkers", pb.ReleaseWorkersRequest(job="two", workers=[release]))
    with job.client("a") as late, refused(errors.Fenced):
        late.push(whole_numbers(TRAINED, 2))
    job.each("DropShards", pb.DropShardsRequest(job="two"))
    with job.client() as reader, refused(errors.UnknownJob):
        reader.pull()


def halves(wire: Wire) -> None:
    """Values and gradients as bfloat16 in synchronous mode: two workers and one server, by gRPC."""
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
    """Pushes with their commit in one call, as bfloat16, over a lane to one server."""
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
    """Pull and push through regions of memory that both sides share."""
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


ON_SERVERS: Mapping[str, tuple[Callable[[Wire], None], int]] = {
    "two-servers": (two_servers, 2),
    "halves": (halves, 1),
    "lanes": (lanes, 2),
    "one-lane": (one_lane, 1),
    "shared-memory": (shared_memory, 1),
}
"""By name of the recording: what clients do to parameter servers, and how many there are."""
