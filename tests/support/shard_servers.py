"""Parameter servers in this process, on real gRPC, without a coordinator: the test plays it."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
from prometheus_client import CollectorRegistry

from shoal import _rpc, consistency, optim
from shoal._layout import Placement
from shoal._parameters import ParameterClient
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import parameter_server_pb2_grpc
from shoal.variables import Variable, variable_from_array
from shoal_coordinator.placement import ServerLoad, assign_shards, plan_shards
from shoal_server.metrics import ServerMetrics
from shoal_server.servicer import SERVICE, ParameterServerServicer
from shoal_server.store import ShardStore


class ShardServers:
    """One job's shards on some servers.

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
    ) -> None:
        self._stack = ExitStack()
        self.registries: list[CollectorRegistry] = []
        self.stores: list[ShardStore] = []
        addresses = [self._start(rpc_threads) for _ in range(servers)]
        self.stubs = [self._stub(address) for address in addresses]
        given = {name: value for name, value in variables.items() if isinstance(value, np.ndarray)}
        specs = {
            name: variable_from_array(value) if isinstance(value, np.ndarray) else value
            for name, value in variables.items()
        }
        loads = [ServerLoad(f"server-{index}", address, 0) for index, address in enumerate(addresses)]
        self.placement = Placement("job", 1, specs, assign_shards(plan_shards(specs, shards), loads))
        self._mode, self._optimizer, self._seed = mode, optimizer, seed
        self._create()
        if given:
            with self.client("", 0) as client:
                client.assign(given)
        self._workers = 0

    def _start(self, rpc_threads: int) -> str:
        registry = CollectorRegistry()
        metrics = ServerMetrics(registry)
        store = ShardStore(metrics.apply_seconds.observe)
        senders, receivers = ThreadPoolExecutor(rpc_threads), ThreadPoolExecutor(rpc_threads)
        servicer = ParameterServerServicer(store, metrics, senders=senders, receivers=receivers)
        add = parameter_server_pb2_grpc.add_ParameterServerServicer_to_server
        server = _rpc.RpcServer("127.0.0.1:0", [(SERVICE, add, servicer)], threads=rpc_threads)
        self._stack.callback(senders.shutdown)
        self._stack.callback(receivers.shutdown)
        self._stack.callback(server.stop, 0.2)
        self._stack.callback(store.clear)
        server.start()
        self.registries.append(registry)
        self.stores.append(store)
        return server.address

    def _stub(self, address: str) -> parameter_server_pb2_grpc.ParameterServerStub:
        channel = _rpc.channel(address)
        self._stack.callback(channel.close)
        return parameter_server_pb2_grpc.ParameterServerStub(channel)

    def _create(self) -> None:
        for address, shards in self.placement.by_server().items():
            request = pb.CreateShardsRequest(
                job=self.placement.job,
                epoch=self.placement.epoch,
                variables=[variable.to_proto(name) for name, variable in self.placement.variables.items()],
                shards=[shard.layout.to_proto() for shard in shards],
                optimizer=(self._optimizer or optim.SGD(1.0)).to_proto(),
                consistency=(self._mode or consistency.Asynchronous()).to_proto(),
                seed=self._seed,
            )
            self._stub(address).CreateShards(request)

    def admit(self, worker: str, incarnation: int = 1, rank: int | None = None) -> int:
        self._workers += 1
        request = pb.AdmitWorkerRequest(
            job="job", worker=worker, incarnation=incarnation, rank=self._workers if rank is None else rank
        )
        return max(stub.AdmitWorker(request).step for stub in self.used_stubs)

    def remove(self, worker: str, incarnation: int = 1) -> None:
        """What the coordinator does when a worker dies."""
        fence = pb.FenceWorkerRequest(job="job", worker=worker, incarnation=incarnation)
        committed = max(stub.FenceWorker(fence).committed_steps for stub in self.used_stubs)
        release = pb.ReleaseWorkerRequest(job="job", worker=worker, incarnation=incarnation, committed_steps=committed)
        for stub in self.used_stubs:
            stub.ReleaseWorker(release)

    @property
    def used_stubs(self) -> list[parameter_server_pb2_grpc.ParameterServerStub]:
        """Of the servers that host a shard."""
        used = {shard.server for shard in self.placement.shards}
        return [stub for index, stub in enumerate(self.stubs) if f"server-{index}" in used]

    def client(
        self, worker: str = "", incarnation: int = 1, *, step: int = 0, refresh: Callable[[], Placement] | None = None
    ) -> ParameterClient:
        return ParameterClient(
            self.placement,
            worker=worker,
            incarnation=incarnation if worker else 0,
            step=step,
            refresh=refresh or (lambda: self.placement),
            retry_for_s=5,
        )

    def worker(self, name: str) -> ParameterClient:
        """Admits a worker and gives its client."""
        step = self.admit(name)
        return self.client(name, step=step)

    def values(self) -> dict[str, np.ndarray]:
        """What a reader pulls."""
        with self.client() as reader:
            return reader.pull()

    def versions(self) -> list[int]:
        """Of all shards."""
        return [shard.version for store in self.stores for shard in store.everything()]

    def waiting(self) -> int:
        """Pulls that wait at any shard."""
        return sum(shard.waiting for store in self.stores for shard in store.everything())

    def sample(self, name: str, **labels: str) -> float:
        """A metric's value, summed over the servers."""
        return sum(registry.get_sample_value(name, labels) or 0 for registry in self.registries)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> "ShardServers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
