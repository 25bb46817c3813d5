"""Clients that read values slowly or not at all take a limited part of a server's memory, and training goes on."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import pytest

from shoal import _rpc, errors
from shoal._limits import catalogue, refusals
from shoal._transport.frames import Frame
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from shoal_server.serving import grpc_endpoint
from shoal_server.shards.values import reader_memory
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

ELEMENTS = 2 << 20  # 8 MB: more than sockets hold
BYTES = 4 * ELEMENTS
REQUEST = pb.PullRequest(stamp=header_pb2.Stamp(job="job", generation=1), shards=[0])
# Returns the error with which the pull was refused or ended.
Outcome = Callable[[], errors.ShoalError]


@contextmanager
def grpc_reader(servers: ShardServers) -> Iterator[Outcome]:
    call = servers.stubs[0].Pull(REQUEST)

    def outcome() -> errors.ShoalError:
        with pytest.raises(errors.ShoalError) as raised, _rpc.as_shoal_errors("server"):
            list(call)
        return raised.value

    yield outcome
    call.cancel()


@contextmanager
def lane_reader(servers: ShardServers) -> Iterator[Outcome]:
    with servers.lane() as lane:
        lane.send(Frame.PULL, REQUEST.SerializeToString())

        def outcome() -> errors.ShoalError:
            try:
                while True:
                    lane.receive()
            except errors.ShoalError as error:
                return error

        yield outcome


@pytest.mark.parametrize("reader", [grpc_reader, lane_reader])
def test_readers_that_stop_keep_few_old_versions(
    reader: Callable[[ShardServers], AbstractContextManager[Outcome]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_memory, "FAIR_S", 0.0)
    monkeypatch.setattr(reader_memory, "FAIR_BYTES_A_S", 1e12)
    monkeypatch.setattr(reader_memory, "PATIENCE_S", 0.0)
    gradient = {"w": np.ones(ELEMENTS, np.float32)}
    with ShardServers({"w": Variable((ELEMENTS,))}, shards=1, rpc_threads=8, max_reader_bytes=4 * BYTES) as servers:
        used = servers.stores[0].readers
        with servers.worker("a") as worker, reader(servers) as first, reader(servers) as second:
            wait_until(lambda: used.nbytes == BYTES, what="the readers of one version, which share its memory")
            worker.push(gradient)
            with reader(servers):
                wait_until(lambda: used.nbytes == 2 * BYTES, what="a reader of the next version")
                worker.push(gradient)
                with reader(servers) as refused:
                    error = refused()
                    assert (error.code, error.details["limit"]) == ("OVERLOADED", "CALLER_READER_BYTES")
                assert used.nbytes <= 2 * BYTES
                # The others were slow, so they make room for a worker, which repeats its pull until then.
                assert worker.pull()["w"][-1] == -2
                for ended in (first, second):
                    assert ended().code in {"OVERLOADED", "UNREACHABLE", "DEADLINE_EXCEEDED"}
        wait_until(lambda: used.nbytes == 0, what="the end of all readers")
    assert refusals("server")[catalogue.CALLER_READER_BYTES.name] > 1


def test_a_pull_by_grpc_that_is_read_slowly_has_one_deadline_in_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each message that is read is progress, so no single wait is long. `Lane.stream` has such a deadline, too."""
    monkeypatch.setattr(grpc_endpoint, "transfer_s", lambda _: 0.1)
    variables = {"w": Variable((4 * ELEMENTS,))}
    with ShardServers(variables, shards=1, transport="grpc", max_reader_bytes=64 * BYTES) as servers:
        call = servers.stubs[0].Pull(REQUEST)
        next(call)
        used = servers.stores[0].readers

        def ended() -> bool:
            servers.endpoints[0].end_stalled()
            return used.nbytes == 0

        wait_until(ended, what="the pull's end")
        with pytest.raises(errors.ShoalError), _rpc.as_shoal_errors("server"):
            list(call)
