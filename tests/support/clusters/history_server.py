"""Parameter server that records pulls and pushes: `history_server.py COORDINATOR NAME`.

It is the server role with one more service for tests: `ask` returns the pulls that a shard has answered and the pushes
that it has committed. The process ends when its standard input closes.
"""

import json
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from unittest import mock

import grpc
from prometheus_client import CollectorRegistry

from shoal import _rpc
from shoal._memory.buffers import BufferPool
from shoal._role import lifecycle
from shoal._wire import ShardLayout
from shoal_server.process import Server, ServerConfig
from shoal_server.shards.group.lock_group import LockGroup
from shoal_server.shards.machine.events import Admission
from shoal_server.shards.machine.norm_exchange import NormOutbox
from shoal_server.shards.store import ShardStore
from shoal_server.shards.values.reader_memory import ReaderMemory
from shoal_server.shards.values.shard import JobShardConfig

SERVICE = "shoal.tests.History"


class RecordedGroup(LockGroup):
    """A lock group that keeps the last pulls and pushes that it let through."""

    def __init__(
        self,
        config: JobShardConfig,
        layouts: Iterable[ShardLayout],
        on_apply: Callable[[float], None],
        memory: BufferPool,
        norms: NormOutbox | None = None,
        readers: ReaderMemory | None = None,
    ) -> None:
        self._admissions = deque[Admission](maxlen=16_384)
        self._recording = threading.Lock()  # guards _admissions
        super().__init__(config, layouts, on_apply, memory, self._record, norms, readers)

    @property
    def admissions(self) -> list[Admission]:
        """The pulls and pushes, oldest first."""
        with self._recording:
            return [*self._admissions]

    def _record(self, admission: Admission) -> None:
        with self._recording:
            self._admissions.append(admission)


class RecordedRpcServer(_rpc.RpcServer):
    """A gRPC server that also tells what the lock groups of a store let through, once it has the store."""

    store: ShardStore | None = None

    def __init__(self, bind: str, services: Sequence[Any], **options: Any) -> None:
        super().__init__(bind, [*services, (SERVICE, add_to_server, self)], **options)

    def get(self, request: bytes, _context: grpc.ServicerContext) -> bytes:
        """Answers `ask`. Requests and replies are JSON, so they need no proto."""
        assert self.store
        job, shard = json.loads(request)
        return json.dumps([asdict(admission) for admission in admissions(self.store, job, shard)]).encode()


def add_to_server(servicer: RecordedRpcServer, server: Any) -> None:
    """Adds the service, as generated code does."""
    server.add_registered_method_handlers(SERVICE, {"Get": grpc.unary_unary_rpc_method_handler(servicer.get)})


@contextmanager
def recording() -> Iterator[None]:
    """Makes each lock group that this process creates meanwhile a `RecordedGroup`."""
    with mock.patch("shoal_server.shards.store.LockGroup", RecordedGroup):
        yield


def ask(address: str, job: str, shard: int) -> list[Admission]:
    """Returns the last pulls that a shard answered and pushes that it committed, oldest first; at most 16,384."""
    with _rpc.channel(address) as channel:
        get: Any = channel.unary_unary(f"/{SERVICE}/Get")  # bytes, as there is no serializer
        reply = get(json.dumps([job, shard]).encode(), timeout=20)
    return [Admission(**told) for told in json.loads(reply)]


def admissions(store: ShardStore, job: str, shard: int) -> list[Admission]:
    """Returns the pulls that a shard in this process answered and the pushes that it committed, while `recording`."""
    (found,) = store.hosted.groups_of(job)
    assert shard in [known.layout.shard for known in found.shards]
    assert isinstance(found, RecordedGroup)
    return found.admissions


def start(coordinator: str, name: str, registry: CollectorRegistry, metrics_address: str) -> Server:
    made: list[RecordedRpcServer] = []

    def recorded(*given: Any, **options: Any) -> RecordedRpcServer:
        made.append(RecordedRpcServer(*given, **options))
        return made[-1]

    with mock.patch("shoal._rpc.RpcServer", recorded):
        server = Server(ServerConfig(name=name, coordinator=coordinator, metrics_address=metrics_address), registry)
    made[0].store = server.store
    return server


def main(coordinator: str, name: str) -> None:
    with recording():
        lifecycle.run_role(
            "server",
            lambda registry, metrics_address: start(coordinator, name, registry, metrics_address),
            metrics_listen="127.0.0.1:0",
            member=name,
            log_level="warning",
            supervised=True,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
