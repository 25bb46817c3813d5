"""Real servers and coordinator of the recordings. Callers pass in all that otherwise differs from run to run.

This includes the coordinator's clock and id. `pinned_draws` fixes the clients' random numbers, `fixed_names` fixes the
names of this machine, and `checkpoint_files` leaves times out of a checkpoint.
"""

import json
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import grpc

from shoal._checkpoint.storage_urls import open_storage
from shoal._rpc import RpcServer
from shoal._system.host import host_id
from shoal.v1 import coordinator_pb2_grpc, job_pb2_grpc, token_pb2_grpc
from shoal.variables import Variable
from shoal_coordinator.api import CoordinatorService, JobsService, TokensService
from shoal_coordinator.cluster import ClusterPolicy
from shoal_coordinator.coordinator import Coordinator
from shoal_coordinator.persistence import open_store
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

# When the coordinator's clock begins: seconds of Unix time.
BEGINNING = 1_700_000_000.0


@contextmanager
def pinned_draws(byte: str = "5a") -> Iterator[None]:
    """Makes clients draw the same tokens and process names each time: repetitions of this byte."""
    with mock.patch.object(secrets, "token_hex", lambda nbytes=32: byte * nbytes):
        yield


def checkpoint_files(folder: Path) -> dict[str, bytes]:
    """Returns the files of the checkpoint that `a_cluster` takes, by name, in their comparable form.

    The manifest lacks the time of the cut, the version of Shoal and the checksum. It has the entries of protobuf's maps
    in order. Its text must have the layout that this function gives it.
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
    """Returns the stand-ins for the version of Shoal and this machine in every recording."""
    return {version("shoal"): "version", host_id(): "host"}


@contextmanager
def bare_servers(count: int, checkpoints: Path | None = None) -> Iterator[ShardServers]:
    """Yields parameter servers without the shards of any scenario."""
    with ShardServers({"other": Variable((1,))}, servers=count, shards=1, checkpoints=checkpoints) as servers:
        yield servers


@dataclass
class Clock:
    """A clock that advances only on command."""

    now: float = BEGINNING

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class PinnedCoordinator:
    """A coordinator with a given id and clock; `with` ends it.

    Args:
        store: path of its store, or "memory".
        checkpoints: folder of its checkpoints.
        clock: returns the time.
    """

    def __init__(self, store: str, checkpoints: Path | str, clock: Clock) -> None:
        policy = ClusterPolicy(heartbeat_timeout_s=1000.0, heartbeat_interval_s=100.0, checkpoints=True)
        folder = open_storage(str(checkpoints))
        self._stack = ExitStack()
        kept = open_store(store)
        self._stack.callback(kept.close)
        self.coordinator = Coordinator(kept, "reef", policy, clock=clock, storage=folder)
        members = CoordinatorService(self.coordinator, heartbeat_timeout_s=1000.0)
        jobs = JobsService(self.coordinator, folder)
        self._stack.callback(jobs.close)
        services: list[tuple[str, Callable[[Any, grpc.Server], None], Any]] = [
            ("shoal.v1.Coordinator", coordinator_pb2_grpc.add_CoordinatorServicer_to_server, members),
            ("shoal.v1.Jobs", job_pb2_grpc.add_JobsServicer_to_server, jobs),
            ("shoal.v1.Tokens", token_pb2_grpc.add_TokensServicer_to_server, TokensService(self.coordinator, None)),
        ]
        server = RpcServer("127.0.0.1:0", services, threads=8)
        self._stack.callback(server.stop, 0.1)
        self._stack.callback(self.coordinator.stop)
        self.coordinator.start()
        server.start()
        self.address = server.address

    def settle(self) -> None:
        """Waits until all decided effects are done."""
        wait_until(lambda: not self._pending_effects(), what="the end of what the coordinator decided")

    def _pending_effects(self) -> bool:
        with self.coordinator.reading() as (machine, _):
            return bool(machine.pending_effects)

    def __enter__(self) -> "PinnedCoordinator":
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@contextmanager
def pinned_cluster(folder: Path, store: str = "memory") -> Iterator[tuple[PinnedCoordinator, ShardServers, Clock]]:
    """Yields a coordinator and two servers, which are not members yet, with one folder of checkpoints."""
    clock = Clock()
    with bare_servers(2, folder) as servers, PinnedCoordinator(store, folder, clock) as coordinator:
        yield coordinator, servers, clock
