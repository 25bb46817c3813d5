"""Rig for a coordinator behind real gRPC, with parameter servers that only record calls."""

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import prometheus_client

from shoal import _rpc, errors
from shoal._rpc.coordinator import CoordinatorClient
from shoal.consistency import Asynchronous
from shoal.job import Job
from shoal.status import JobState
from shoal.v1 import coordinator_pb2 as members
from shoal.v1 import job_pb2 as jobs
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import parameter_server_pb2_grpc
from shoal.variables import Variable
from shoal_coordinator.process import CoordinatorConfig, CoordinatorProcess, start_coordinator
from support.waiting import wait_until

HEARTBEAT_TIMEOUT_S = 1.5
MAX_WATCHERS = 3


class Notes(parameter_server_pb2_grpc.ParameterServerServicer):
    """A parameter server that only records its calls."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.calls: list[object] = []
        self.fails: dict[str, errors.ShoalError] = {}
        self.holds: dict[str, threading.Event] = {}  # calls of a kind that wait for something

    def note(self, kind: str, request: object) -> None:
        self.calls.append(request)
        if kind in self.holds:
            self.holds[kind].wait(20)
        if kind in self.fails:
            raise self.fails[kind]

    def of(self, kind: type) -> list[Any]:
        return [call for call in self.calls if isinstance(call, kind)]

    @_rpc.servicer
    def CreateShards(self, request: Any, context: Any) -> Any:
        self.note("CreateShards", request)
        return pb.CreateShardsReply()

    @_rpc.servicer
    def Restore(self, request: Any, context: Any) -> Any:
        self.note("Restore", request)
        return pb.RestoreReply()

    @_rpc.servicer
    def DropShards(self, request: Any, context: Any) -> Any:
        self.note("DropShards", request)
        return pb.DropShardsReply()

    @_rpc.servicer
    def AdmitWorkers(self, request: Any, context: Any) -> Any:
        self.note("AdmitWorkers", request)
        return pb.AdmitWorkersReply(results=[pb.AdmissionResult(step=self.step) for _ in request.workers])

    @_rpc.servicer
    def FenceWorkers(self, request: Any, context: Any) -> Any:
        self.note("FenceWorkers", request)
        return pb.FenceWorkersReply(committed_steps=[self.step for _ in request.workers])

    @_rpc.servicer
    def ReleaseWorkers(self, request: Any, context: Any) -> Any:
        self.note("ReleaseWorkers", request)
        return pb.ReleaseWorkersReply()


class Rig:
    """A coordinator, two recording servers, and calls to them.

    Args:
        store: store of the coordinator.
        checkpoints: folder of its checkpoints; empty: none.
        heartbeat_timeout_s: seconds after which a silent member is lost.
        page: configuration of its page.
    """

    def __init__(
        self,
        store: str = "memory",
        checkpoints: str = "",
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
        **page: Any,
    ) -> None:
        self.store, self.checkpoints, self.page = store, checkpoints, page
        self.heartbeat_timeout_s = heartbeat_timeout_s
        self.failures: list[errors.ShoalError] = []
        self.process = self._start("127.0.0.1:0")
        self.client = CoordinatorClient(self.process.address, retry_for_s=5.0)
        self.lives: dict[str, int] = {}
        self.updates = 0  # that servers say they have applied
        # The stubs take RPCs that a fake leaves to gRPC's "unimplemented" for abstract methods.
        self.notes = {name: Notes(step) for step, name in ((3, "s0"), (5, "s1"))}  # type: ignore[abstract]
        self.servers = []
        for name, notes in self.notes.items():
            add = parameter_server_pb2_grpc.add_ParameterServerServicer_to_server
            server = _rpc.RpcServer("127.0.0.1:0", [("shoal.v1.ParameterServer", add, notes)], threads=2)
            server.start()
            self.servers.append(server)
            self.register(members.SERVER, name, address=server.address)
        self.silent: set[str] = set()
        self.stopped = threading.Event()
        self.heart = threading.Thread(target=self.beat_on)
        self.heart.start()

    def _start(self, listen: str) -> CoordinatorProcess:
        self.registry = prometheus_client.CollectorRegistry()
        config = CoordinatorConfig(
            listen=listen,
            store=self.store,
            heartbeat_timeout_s=self.heartbeat_timeout_s,
            heartbeat_interval_s=0.1,
            max_watchers=MAX_WATCHERS,
            threads=4,
            checkpoints=self.checkpoints,
            **self.page,
        )
        return start_coordinator(config, self.registry, self.failures.append)

    def restart(self) -> None:
        """Stops the coordinator and starts another one on the same port and store."""
        self.process.stop()
        self.process = self._start(self.process.address)

    def stop(self) -> None:
        self.stopped.set()
        self.heart.join()
        self.client.close()
        self.process.stop()
        for server in self.servers:
            server.stop(0.1)

    def beat_on(self) -> None:
        while not self.stopped.wait(0.1):
            for name in set(self.lives) - self.silent:
                try:
                    self.beat(name)
                except KeyError:  # it has left meanwhile
                    continue
                except errors.Fenced:
                    if name not in self.silent:  # else it was silenced, and left, after this turn had begun
                        raise
                except errors.Unreachable:
                    if not self.stopped.is_set():  # else a restart that was to fail has left no coordinator
                        raise

    def register(self, role: Any, name: str, **fields: Any) -> int:
        request = members.RegisterRequest(role=role, member=name, process=fields.pop("process", f"p-{name}"), **fields)
        self.lives[name] = self.client.call(self.client.members.Register, request).incarnation
        return self.lives[name]

    def beat(self, name: str) -> Any:
        load = members.ServerLoad(updates=self.updates)
        request = members.HeartbeatRequest(member=name, incarnation=self.lives[name], shards=1, bytes=64, load=load)
        return self.client.call(self.client.members.Heartbeat, request)

    def member_status(self) -> dict[str, members.Member]:
        reply = self.client.call(self.client.members.GetStatus, members.GetStatusRequest())
        return {member.member: member for member in reply.members}

    def job(self, method: str, **fields: Any) -> Any:
        """Calls a method of the service Jobs by name. The fields that identify a worker are filled in."""
        if "worker" in fields:
            fields.setdefault("incarnation", self.lives[fields["worker"]])
            if fields["incarnation"] == self.lives[fields["worker"]]:
                fields.setdefault("assignment", self.beat(fields["worker"]).assignment)
        request = getattr(jobs, f"{method}Request")(**fields)
        return self.client.call(getattr(self.client.jobs, method), request)

    def submit(self, spec: Job) -> jobs.JobStatus:
        reply: jobs.SubmitReply = self.job("Submit", spec=spec.to_proto())
        return reply.status

    def describe(
        self, name: str, worker: str, variables: Mapping[str, Variable] | None = None, samples: int = 64
    ) -> Any:
        variables = variables or {"w": Variable((8, 4)), "v": Variable((8, 4))}  # a shard for each server
        messages = [variable.to_proto(key) for key, variable in variables.items()]
        return self.job("Describe", job=name, worker=worker, variables=messages, samples=samples)

    def state(self, name: str) -> JobState:
        return JobState.from_proto(self.job("Get", job=name).status.state)

    def join(self, name: str, worker: str) -> jobs.JoinReply:
        """Repeats Join until the worker is ready."""
        replies: list[jobs.JoinReply] = []

        def ready() -> bool:
            replies.append(self.job("Join", job=name, worker=worker))
            return replies[-1].ready

        wait_until(ready, what=f"{worker}'s entry")
        return replies[-1]

    def run(self, spec: Job, *workers: str) -> None:
        """Brings a job to RUNNING."""
        self.submit(spec)
        for worker in workers:
            self.describe(spec.name, worker)
        with ThreadPoolExecutor(len(workers)) as pool:
            list(pool.map(lambda worker: self.join(spec.name, worker), workers))


def job(name: str = "a", workers: int = 2, **options: Any) -> Job:
    options.setdefault("shards", 2)  # on two servers, small as its variables are
    options.setdefault("consistency", Asynchronous())
    return Job("m:f", name=name, workers=workers, **options)
