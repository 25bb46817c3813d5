"""Parameter server that records pulls and pushes: `history_server.py COORDINATOR NAME`.

It is the server role with one more service for tests: `ask` returns the pulls that a shard has answered and the pushes
that it has committed. The process ends when its standard input closes.
"""

import json
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import grpc
from prometheus_client import CollectorRegistry

from shoal import _rpc
from shoal._role import lifecycle
from shoal_server.process import Server, ServerConfig
from shoal_server.shards.events import Admission
from shoal_server.shards.state import GroupState
from shoal_server.shards.store import ShardStore

SERVICE = "shoal.tests.History"


class History:
    """The last pulls and pushes that a lock group let through, oldest first."""

    def __init__(self) -> None:
        self.admissions = deque[Admission](maxlen=16_384)

    def __call__(self, admission: Admission) -> None:
        self.admissions.append(admission)


@contextmanager
def recording() -> Iterator[None]:
    """Gives each lock group that this process creates meanwhile a history."""
    original = GroupState.__post_init__

    def initialize(state: GroupState) -> None:
        original(state)
        state.on_admission = History()

    GroupState.__post_init__ = initialize  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        GroupState.__post_init__ = original  # type: ignore[method-assign]


def ask(address: str, job: str, shard: int) -> list[Admission]:
    """Returns the last pulls that a shard answered and pushes that it committed, oldest first; at most 16,384."""
    with _rpc.channel(address) as channel:
        get: Any = channel.unary_unary(f"/{SERVICE}/Get")  # bytes, as there is no serializer
        reply = get(json.dumps([job, shard]).encode(), timeout=20)
    return [Admission(**told) for told in json.loads(reply)]


def admissions(store: ShardStore, job: str, shard: int) -> list[Admission]:
    """Returns the pulls that a shard in this process answered and the pushes that it committed, while `recording`."""
    found = store.group_at_any_generation(job)
    assert shard in [known.layout.shard for known in found.shards]
    with found._lock:
        history = found._state.on_admission
        assert isinstance(history, History)
        return list(history.admissions)


def history_of(store: ShardStore) -> grpc.GenericRpcHandler:
    """Creates the service. Its requests and replies are JSON, so it needs no proto."""

    def get(request: bytes, _context: grpc.ServicerContext) -> bytes:
        job, shard = json.loads(request)
        return json.dumps([asdict(admission) for admission in admissions(store, job, shard)]).encode()

    return grpc.method_handlers_generic_handler(SERVICE, {"Get": grpc.unary_unary_rpc_method_handler(get)})


def start(coordinator: str, name: str, registry: CollectorRegistry, metrics_address: str) -> Server:
    server = Server(ServerConfig(name=name, coordinator=coordinator, metrics_address=metrics_address), registry)
    server._rpc._server.add_generic_rpc_handlers((history_of(server.store),))
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
