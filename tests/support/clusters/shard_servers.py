"""Parameter servers in this process, on real gRPC and lanes. The test plays the coordinator."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from prometheus_client import CollectorRegistry

from shoal import _rpc, consistency, optim
from shoal._checkpoint.catalogue import Catalogue
from shoal._checkpoint.manifest import FileEntry, Manifest
from shoal._checkpoint.storage_urls import open_storage
from shoal._security import NO_CREDENTIALS, Credentials
from shoal._training.parameters import ParameterClient
from shoal._transport.frames import PARAMETER_SERVER, Frame
from shoal._transport.lane import Lane
from shoal._wire.placement import Placement
from shoal.v1 import header_pb2, parameter_server_pb2_grpc
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable, variable_from_array
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards
from shoal_server.calling_server import CallingServer
from shoal_server.checkpoints.writer import CheckpointWriter
from shoal_server.metrics import ServerMetrics
from shoal_server.norm_sender import NormSender
from shoal_server.pools import call_pools
from shoal_server.replication import Copies
from shoal_server.serving.endpoint import EndpointConfig
from shoal_server.serving.lane_endpoint import LaneEndpoint
from shoal_server.serving.registry import EndpointGroup
from shoal_server.serving.service import DataService
from shoal_server.serving.servicer import SERVICE, ParameterServerServicer, add_to_server
from shoal_server.shards.machine.worker_progress import WorkerProgress
from shoal_server.shards.store import ShardStore


class ShardServers:
    """The shards of one job on some servers.

    `variables` may be arrays, which are assigned at once.
    """

    def __init__(
        self,
        variables: Mapping[str, Variable | np.ndarray],
        *,
        servers: int = 1,
        shards: int = 2,
        mode: consistency.Consistency | None = None,
        optimizer: optim.Optimizer | None = None,
        seed: int = 0,
        rpc_threads: int = 4,
        max_lanes: int = 1024,
        max_reader_bytes: int | None = None,
        stall_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        transport: str | None = None,
        wire: str | None = None,
        checkpoints: Path | str | None = None,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        self._credentials = credentials
        self._stack = ExitStack()
        self._checkpoints = open_storage(str(checkpoints)) if checkpoints else None
        self.registries: list[CollectorRegistry] = []
        self.stores: list[ShardStore] = []
        self.lanes: list[LaneEndpoint] = []
        self.endpoints: list[EndpointGroup] = []
        self.services: list[DataService] = []
        self._max_reader_bytes = max_reader_bytes
        self.addresses = [self._start(rpc_threads, max_lanes, stall_s, clock) for _ in range(servers)]
        self.stubs = [self._stub(address) for address in self.addresses]
        given = {name: value for name, value in variables.items() if isinstance(value, np.ndarray)}
        specs = {
            name: variable_from_array(value) if isinstance(value, np.ndarray) else value
            for name, value in variables.items()
        }
        candidates = [Candidate(f"server-{index}", address, 0) for index, address in enumerate(self.addresses)]
        layouts = plan_shards(specs, shards, np.dtype(wire) if wire else None)
        self.placement = Placement("job", 1, specs, assign_shards(layouts, candidates))
        self._mode, self._optimizer, self._seed, self._transport = mode, optimizer, seed, transport
        self._create()
        if given:
            with self.client("", 0) as client:
                client.assign(given)
        self._workers = 0

    def _start(self, rpc_threads: int, max_lanes: int, stall_s: float, clock: Callable[[], float]) -> str:
        registry = CollectorRegistry()
        metrics = ServerMetrics(registry)
        caller = CallingServer(f"server-{len(self.stores)}", 1, self._credentials)
        store = ShardStore(
            metrics.applied,
            norms_of=lambda job: NormSender(job, lambda: caller),
            most_reader_bytes=self._max_reader_bytes,
        )
        pools = call_pools(rpc_threads)
        metrics.watch(store, pools)
        config = EndpointConfig(
            host="127.0.0.1",
            lanes=max_lanes,
            credentials=self._credentials,
            senders=pools["pull"],
            receivers=pools["push"],
            committers=pools["commit"],
            stall_s=stall_s,
            clock=clock,
        )
        service = DataService(store, metrics)
        self.services.append(service)
        copies = Copies(store, lambda _: caller)
        self._stack.callback(copies.close)
        endpoints = EndpointGroup(service, config)
        writer = CheckpointWriter(self._checkpoints, f"server-{len(self.stores)}")
        self._stack.callback(writer.close)
        servicer = ParameterServerServicer(
            store, endpoints, service=service, copies=copies, threads=pools, writer=writer
        )
        server = _rpc.RpcServer(
            "127.0.0.1:0",
            [(SERVICE, add_to_server, servicer)],
            threads=rpc_threads,
            credentials=self._credentials,
        )
        for pool in pools.values():
            self._stack.callback(pool.shutdown)
        self._stack.callback(server.stop, 0.2)
        self._stack.callback(endpoints.stop)
        self._stack.callback(store.clear)
        endpoints.start(server.address)
        server.start()
        lanes = endpoints["lane"]
        assert isinstance(lanes, LaneEndpoint)
        self.lanes.append(lanes)
        self.endpoints.append(endpoints)
        self.registries.append(registry)
        self.stores.append(store)
        return server.address

    def _stub(self, address: str) -> parameter_server_pb2_grpc.ParameterServerStub:
        channel = _rpc.channel(address, self._credentials)
        self._stack.callback(channel.close)
        return parameter_server_pb2_grpc.ParameterServerStub(channel)

    def _create(self) -> None:
        optimizer = self._optimizer or optim.SGD(1.0)
        servers = {shard.address: shard.server for shard in self.placement.shards} if optimizer.clip_norm else {}
        for address, shards in self.placement.by_server().items():
            request = pb.CreateShardsRequest(
                job=self.placement.job,
                generation=self.placement.generation,
                variables=[variable.to_proto(name) for name, variable in self.placement.variables.items()],
                shards=[shard.layout.to_proto() for shard in shards],
                optimizer=optimizer.to_proto(),
                consistency=(self._mode or consistency.Asynchronous()).to_proto(),
                seed=self._seed,
                peers=[pb.Peer(server=name, address=other) for other, name in servers.items() if other != address],
            )
            self._stub(address).CreateShards(request)

    def admit(self, worker: str, incarnation: int = 1, rank: int | None = None) -> int:
        self._workers += 1
        rank = self._workers if rank is None else rank
        admission = pb.WorkerAdmission(worker=worker, incarnation=incarnation, rank=rank)
        replies = self.each("AdmitWorkers", pb.AdmitWorkersRequest(job="job", workers=[admission]))
        results = [result for reply in replies for result in reply.results]
        for result in results:
            if result.HasField("error"):
                raise _rpc.error_of(result.error)
        return max((result.step for result in results), default=0)

    def remove(self, worker: str, incarnation: int = 1) -> None:
        """Removes a worker, as the coordinator does when the worker dies."""
        fence = pb.WorkerFence(worker=worker, incarnation=incarnation)
        replies = self.each("FenceWorkers", pb.FenceWorkersRequest(job="job", workers=[fence]))
        committed = max(steps for reply in replies for steps in reply.committed_steps)
        release = pb.WorkerRelease(worker=worker, incarnation=incarnation, committed_steps=committed)
        self.each("ReleaseWorkers", pb.ReleaseWorkersRequest(job="job", workers=[release]))

    def hold(self, cut: int = 1) -> dict[str, WorkerProgress]:
        """Takes the first half of a cut: holds commits. Returns the furthest step of each worker on any server."""
        furthest: dict[str, WorkerProgress] = {}
        for reply in self.each("HoldCommits", pb.HoldCommitsRequest(job="job", generation=1, cut=cut)):
            for it in reply.workers:
                progress = WorkerProgress(it.incarnation, it.committed, it.finished)
                furthest[it.worker] = furthest.get(it.worker, progress).joined(progress)
        return furthest

    def cut(
        self, furthest: Mapping[str, WorkerProgress], *, number: int = 1, cut: int = 1, hold_s: float = 0.0
    ) -> list[pb.SavedShard]:
        """Takes the second half of a cut: saves the shards. Returns what the servers report of each shard."""
        workers = [
            pb.WorkerProgress(worker=worker, incarnation=it.incarnation, committed=it.committed, finished=it.finished)
            for worker, it in furthest.items()
        ]
        request = pb.SaveRequest(job="job", generation=1, cut=cut, number=number, workers=workers, hold_s=hold_s)
        return [shard for reply in self.each("Save", request) for shard in reply.shards]

    def publish(self, saved: Iterable[pb.SavedShard], *, number: int = 1) -> Manifest:
        """Completes a checkpoint after its cut: collects the files and writes the manifest."""
        ((version, step),) = {(shard.version, shard.step) for shard in saved}
        entries = []
        for stub in self.used_stubs:
            reply = pb.CollectFilesReply()
            while not reply.done:
                with _rpc.as_shoal_errors("server"):
                    reply = stub.CollectFiles(pb.CollectFilesRequest(job="job", number=number, within_s=10))
            entries += [FileEntry(it.name, it.bytes, tuple(it.sums), tuple(it.tensors)) for it in reply.files]
        manifest = Manifest("job", number, 0.0, step, version, {}, (), tuple(entries))
        assert self._checkpoints
        Catalogue(self._checkpoints).publish(manifest)
        return manifest

    def save(self, number: int = 1, *, cut: int = 1) -> Manifest:
        """Takes a whole checkpoint, as the coordinator does."""
        return self.publish(self.cut(self.hold(cut), number=number, cut=cut), number=number)

    def restore(self, manifest: Manifest, *, partial: bool = False) -> None:
        """Restores a checkpoint, as the coordinator does."""
        self.each(
            "Restore",
            pb.RestoreRequest(
                job="job",
                generation=1,
                from_job=manifest.job,
                number=manifest.number,
                version=manifest.version,
                step=manifest.step,
                partial=partial,
            ),
        )

    def each(self, method: str, request: Any) -> list[Any]:
        """Calls every server that hosts a shard."""
        with _rpc.as_shoal_errors("server"):
            return [getattr(stub, method)(request) for stub in self.used_stubs]

    @property
    def used_stubs(self) -> list[parameter_server_pb2_grpc.ParameterServerStub]:
        """Returns the stubs of the servers that host a shard."""
        used = {shard.server for shard in self.placement.shards}
        return [stub for index, stub in enumerate(self.stubs) if f"server-{index}" in used]

    def client(
        self,
        worker: str = "",
        incarnation: int = 1,
        *,
        step: int = 0,
        refresh: Callable[[], Placement] | None = None,
        transport: str | None = None,
        locate: Callable[[Placement], Placement] | None = None,
        replicated: bool = False,
    ) -> ParameterClient:
        return ParameterClient(
            self.placement,
            worker=worker,
            incarnation=incarnation if worker else 0,
            step=step,
            refresh=refresh or (lambda: self.placement),
            retry_for_s=5,
            transport=transport or self._transport,
            credentials=self._credentials,
            locate=locate,
            replicated=replicated,
        )

    def worker(self, name: str) -> ParameterClient:
        """Admits a worker and returns its client."""
        step = self.admit(name)
        return self.client(name, step=step)

    @contextmanager
    def lane(self, server: int = 0, segment: pb.Segment | None = None) -> Iterator["RawLane"]:
        """Opens a lane to a server, on which the test can send any message."""
        offer = self.lanes[server].offer
        with RawLane(offer.address) as lane:
            lane.welcome = lane.open_handshake(pb.LaneHello(token=offer.token, segment=segment))
            yield lane

    @property
    def open_lanes(self) -> int:
        """Returns the number of open lanes of all servers."""
        return sum(lanes.count for lanes in self.lanes)

    def values(self) -> dict[str, np.ndarray]:
        """Returns the values that a reader pulls."""
        with self.client() as reader:
            return reader.pull()

    def versions(self) -> list[int]:
        """Returns the versions of all shards."""
        return [group.version for store in self.stores for group in store.hosted.all() for _ in group.shards]

    def waiting(self) -> int:
        """Returns the number of pulls that wait at any server."""
        return sum(store.queues()[0] for store in self.stores)

    def sample(self, name: str, **labels: str) -> float:
        """Returns a metric's value, summed over the servers and over all labels that are not given."""
        return sum(
            sample.value
            for registry in self.registries
            for family in registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class RawLane:
    """The client end of a lane, which can send messages of the generated classes in any order. `with` ends it.

    Attributes:
        welcome: the server's welcome.
    """

    def __init__(self, address: str) -> None:
        self._lane = Lane.connect(*_rpc.parse_address(address), PARAMETER_SERVER, timeout_s=5.0)
        self.welcome = pb.LaneWelcome()

    def open_handshake(self, hello: pb.LaneHello) -> pb.LaneWelcome:
        self.send(Frame.HELLO, hello.SerializeToString())
        return pb.LaneWelcome.FromString(self.answer(Frame.WELCOME))

    def pull(self, request: pb.PullRequest) -> list[pb.PullReply]:
        self.send(Frame.PULL, request.SerializeToString())
        replies: list[pb.PullReply] = []
        while True:
            kind, payload = self.receive()
            if kind is Frame.END:
                return replies
            assert kind is Frame.VALUES
            replies.append(pb.PullReply.FromString(payload))

    def push(self, messages: Iterable[bytes]) -> pb.PushReply:
        for message in messages:
            self.send(Frame.PUSH, message)
        self.send(Frame.END)
        return pb.PushReply.FromString(self.answer(Frame.PUSHED))

    def commit(self, request: pb.CommitRequest) -> pb.PushReply:
        self.send(Frame.COMMIT, request.SerializeToString())
        return pb.PushReply.FromString(self.answer(Frame.PUSHED))

    def send(self, kind: Frame, payload: bytes = b"") -> None:
        self._lane.send(kind, [payload])

    def receive(self) -> tuple[Frame, bytes]:
        """Returns the next frame. If it is an error, raises the error."""
        kind, payload = self._lane.receive(within_s=20.0)
        if kind is Frame.ERROR:
            raise _rpc.error_of(header_pb2.ErrorDetail.FromString(bytes(payload)))
        return Frame(kind), bytes(payload)

    def answer(self, kind: Frame) -> bytes:
        answered, payload = self.receive()
        assert answered is kind
        return payload

    def close(self) -> None:
        self._lane.close()

    def __enter__(self) -> "RawLane":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
