"""Fuzz targets of RPC handlers: drawn requests to the servicers of a coordinator and a server, without the network."""

import random
import tempfile
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from prometheus_client import CollectorRegistry

from shoal import consistency, optim
from shoal._checkpoint import open_storage
from shoal._rpc.callers import set_caller
from shoal._security import GIVEN_ROLES, NO_CREDENTIALS, AccessRole, Principal
from shoal.consistency import Asynchronous
from shoal.job import Job
from shoal.v1 import coordinator_pb2, group_pb2, job_pb2, token_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal_coordinator.access import Access
from shoal_coordinator.api import CoordinatorService, GroupsService, JobsService, TokensService
from shoal_coordinator.groups import GroupRegistry
from shoal_coordinator.logins import Logins
from shoal_server.calling_server import CallingServer
from shoal_server.checkpoints import CheckpointWriter
from shoal_server.metrics import ServerMetrics
from shoal_server.pools import call_pools
from shoal_server.replication import Copies
from shoal_server.serving import DataService, EndpointConfig, EndpointGroup, ParameterServerServicer
from support.clusters.coordinator_rig import Rig
from support.fuzzing.campaign import BadStatus, Target
from support.fuzzing.messages import Drawer
from support.fuzzing.wire_targets import JOB, VARIABLES, WORDS, placement, store

SPEC = Job("m:f", name=JOB, workers=1, consistency=Asynchronous(), shards=2)
_INPUTS_OF_A_STATE = 5_000

Method = tuple[str, type[Message]]


def methods_of(file: Any, service: str) -> list[Method]:
    """Returns the methods of a service with their requests."""
    found = file.DESCRIPTOR.services_by_name[service]
    return [(it.name, GetMessageClass(it.input_type)) for it in found.methods]


class Aborted(Exception):
    """A handler has ended its call with a status."""


class Context:
    """The context of a call without a network. It records the status."""

    def __init__(self) -> None:
        self.code = grpc.StatusCode.OK
        self.text = ""

    def set_code(self, code: grpc.StatusCode) -> None:
        self.code = code

    def set_details(self, text: str) -> None:
        self.text = text

    def set_trailing_metadata(self, _metadata: object) -> None: ...

    def abort(self, code: grpc.StatusCode, text: str) -> None:
        self.code, self.text = code, text
        raise Aborted

    def is_active(self) -> bool:
        return True

    def add_callback(self, _call: object) -> bool:
        return True

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def check(self, method: str) -> None:
        """Raises BadStatus if the call has ended with INTERNAL or UNKNOWN."""
        if self.code in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN):
            raise BadStatus(f"{method}: {self.code.name}: {self.text}")


class _Handlers:
    """Requests to the methods of some services. The first byte of an input selects the method."""

    name = ""
    allowed: tuple[type[Exception], ...] = ()

    def __init__(self) -> None:
        self.methods: list[tuple[str, type[Message], Any]] = []
        self.drawer = Drawer({})
        self.seeds: dict[str, list[bytes]] = {}

    def add(self, servicer: object, methods: Iterable[Method]) -> None:
        self.methods += [(name, kind, getattr(servicer, name)) for name, kind in methods if hasattr(servicer, name)]

    def draw(self, draw: random.Random) -> bytes:
        index = draw.randrange(len(self.methods))
        name, kind, _ = self.methods[index]
        return bytes([index]) + self.drawer.encoded(draw, kind, self.seeds.get(name, ()))

    def run(self, data: bytes) -> None:
        name, kind, handler = self.methods[data[0] % len(self.methods)] if data else self.methods[0]
        try:
            request: Any = kind.FromString(data[1:])
        except DecodeError:
            return
        if name == "Watch":
            request.no_wait = True
        context = Context()
        try:
            reply = handler(request, context)
            if isinstance(reply, Iterator):
                for _ in islice(reply, 50):
                    pass
        except Aborted:
            pass
        context.check(name)


class CoordinatorHandlers(_Handlers):
    """The handlers of a coordinator with a running job."""

    name = "coordinator_rpcs"

    def start(self) -> None:
        self._begin()
        self.drawer = Drawer(
            WORDS
            | {
                "job": [JOB, "s"],
                "worker": ["w", "s0"],
                "member": ["w", "s0", "s1", "x"],
                "incarnation": [1, 2, 3],
                "assignment": [0, 1],
                "name": ["a", "b", JOB, "sgd", "adam"],
                "process": ["p", "p-w"],
                "program": ["m:f"],
                "version": ["", "0.1.0"],
                "address": ["127.0.0.1:9"],
                "metrics_address": ["127.0.0.1:9"],
                "wait_s": [0.0],
                "shape": [2, 3],
                "parameters": [],
            }
        )
        variables = [variable.to_proto(name) for name, variable in VARIABLES.items()]
        self.seeds = {
            "Submit": [job_pb2.SubmitRequest(spec=SPEC.to_proto()).SerializeToString()],
            "Describe": [
                job_pb2.DescribeRequest(
                    job=JOB, worker="w", incarnation=3, variables=variables, samples=64
                ).SerializeToString()
            ],
        }

    def _begin(self) -> None:
        """Starts a coordinator with a running job: the inputs before have changed the last one's state."""
        self._left = _INPUTS_OF_A_STATE
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._rig = Rig(checkpoints=self._folder.name, heartbeat_timeout_s=600.0)
        self._rig.silent |= {"s0", "s1", "w"}
        self._rig.register(coordinator_pb2.WORKER, "w")
        self._rig.run(SPEC, "w")
        shell = self._rig.process.coordinator
        self._jobs = JobsService(shell, open_storage(self._folder.name))
        self.methods = []
        self.add(CoordinatorService(shell, heartbeat_timeout_s=5.0), methods_of(coordinator_pb2, "Coordinator"))
        self.add(self._jobs, methods_of(job_pb2, "Jobs"))
        self.add(GroupsService(GroupRegistry()), methods_of(group_pb2, "Groups"))

    def run(self, data: bytes) -> None:
        self._left -= 1
        if not self._left:
            self.stop()
            self._begin()
        super().run(data)

    def stop(self) -> None:
        self._jobs.close()
        self._rig.stop()
        self._folder.cleanup()


class ServerHandlers(_Handlers):
    """The handlers of a server with a job, except those of the data plane."""

    name = "server_rpcs"

    def start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        metrics = ServerMetrics(CollectorRegistry())
        self._store = store(most_bytes=64 << 20)
        pools = call_pools(2)
        config = EndpointConfig(
            host="127.0.0.1", lanes=0, senders=pools["pull"], receivers=pools["push"], committers=pools["commit"]
        )
        self._writer = CheckpointWriter(open_storage(self._folder.name), "s")
        service = DataService(self._store, metrics)
        endpoints = EndpointGroup(service, config)
        copies = Copies(self._store, lambda _: CallingServer("s", 1, NO_CREDENTIALS))
        servicer = ParameterServerServicer(
            self._store, endpoints, service=service, copies=copies, threads=pools, writer=self._writer
        )
        # The last one connects to the address in its request.
        left_out = ("Pull", "Push", "Assign", "Commit", "AddBackup")
        self.add(servicer, [it for it in methods_of(pb, "ParameterServer") if it[0] not in left_out])
        self.drawer = Drawer(
            WORDS | {"name": [*VARIABLES], "shape": [2, 3, 6], "cut": [1], "number": [1], "rank": [0, 1]}
        )
        create = pb.CreateShardsRequest(
            job=JOB,
            generation=2,
            variables=[variable.to_proto(name) for name, variable in VARIABLES.items()],
            shards=[shard.layout.to_proto() for shard in placement().shards],
            optimizer=optim.Adam(0.1).to_proto(),
            consistency=consistency.Asynchronous().to_proto(),
        )
        hold = pb.HoldCommitsRequest(job=JOB, generation=1, cut=1)
        save = pb.SaveRequest(job=JOB, generation=1, cut=1, number=1)
        self.seeds = {
            "CreateShards": [create.SerializeToString()],
            "HoldCommits": [hold.SerializeToString()],
            "Save": [save.SerializeToString()],
        }

    def stop(self) -> None:
        self._store.clear()
        self._writer.close()
        self._folder.cleanup()


class TokenHandlers(_Handlers):
    """The handlers of the tokens, for several callers. The first byte of an input also selects the caller."""

    name = "tokens_rpcs"

    def start(self) -> None:
        self._begin()
        ids = [token.id for token in self._access.tokens()]
        self.drawer = Drawer(
            {
                "job": [JOB],
                "worker": ["w", "x"],
                "incarnation": [3],
                "name": ["ann", "a-b", "local"],
                "role": [role.value for role in AccessRole],
                "valid_s": [60.0, 1e9],
                "token": [*ids, "ann", "local", "cert:1f", "cert:", "cert:-1", "local-00000000"],
            }
        )

    def _begin(self) -> None:
        """Starts without tokens of earlier inputs."""
        self._left = _INPUTS_OF_A_STATE
        self._rig = Rig(heartbeat_timeout_s=600.0)
        self._access = Access({}, lambda _: None, time.time)
        self._access.local_tokens()
        made = [self._access.create("ann", role.value, 3_600.0)[1] for role in GIVEN_ROLES]
        callers = [self._access.verifier.identify(token) for token in made]
        self._callers = [None, *callers, Principal("w", AccessRole.WORKER, "t", JOB, 3)]
        shell = self._rig.process.coordinator
        servicer = TokensService(shell, self._access, Logins(self._access, time.time), lambda: "https://localhost")
        self.methods = []
        self.add(servicer, methods_of(token_pb2, "Tokens"))

    def draw(self, draw: random.Random) -> bytes:
        data = super().draw(draw)
        return bytes([data[0] + len(self.methods) * draw.randrange(len(self._callers))]) + data[1:]

    def run(self, data: bytes) -> None:
        self._left -= 1
        if not self._left:
            self.stop()
            self._begin()
        number = data[0] // len(self.methods) if data else 0
        set_caller(self._callers[number % len(self._callers)])
        try:
            super().run(data)
        finally:
            set_caller(None)

    def stop(self) -> None:
        self._rig.stop()


def targets() -> list[Target]:
    """Returns the targets of this module."""
    return [CoordinatorHandlers(), ServerHandlers(), TokenHandlers()]
