"""Norm sender: each server gets the squares of a step, however often it fails before, and nothing is left behind."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from shoal import _rpc, consistency, errors, optim
from shoal._security import NO_CREDENTIALS, Credentials
from shoal.status import UndeliveredNorm
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import parameter_server_pb2_grpc
from shoal_server import norm_sender
from shoal_server.calling_server import CallingServer
from shoal_server.norm_sender import NormSender
from shoal_server.shards import JobShardConfig, Peer
from support.waiting import wait_until


class Server(parameter_server_pb2_grpc.ParameterServerServicer):
    """A server that notes norms, after it has failed some times."""

    def __init__(self, failures: list[errors.ShoalError]) -> None:
        self.failures, self.got = failures, queue.Queue[tuple[Any, ...]]()

    @_rpc.servicer
    def ShareNorm(self, request: pb.ShareNormRequest, context: Any) -> pb.ShareNormReply:
        if self.failures:
            raise self.failures.pop(0)
        named = (request.job, request.generation, request.server, request.incarnation)
        self.got.put((*named, request.step, *request.squares))
        return pb.ShareNormReply()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def started(stack: ExitStack, *failures: errors.ShoalError) -> tuple[Server, Peer]:
    server = Server([*failures])  # type: ignore[abstract]
    add: Any = parameter_server_pb2_grpc.add_ParameterServerServicer_to_server
    rpc = _rpc.RpcServer("127.0.0.1:0", [("shoal.v1.ParameterServer", add, server)], threads=2)
    stack.callback(rpc.stop, 0.0)
    rpc.start()
    return server, Peer(f"at-{rpc.address}", rpc.address)


def sender_to(
    *peers: Peer, credentials: Credentials = NO_CREDENTIALS, clock: Callable[[], float] = time.monotonic
) -> NormSender:
    config = JobShardConfig("job", 3, {}, optim.SGD(0.1, clip_norm=1.0), consistency.Synchronous(), 0, peers)
    return NormSender(config, lambda: CallingServer("me", 7, credentials), clock)


def sends_norms() -> bool:
    return any(thread.name == "norms" for thread in threading.enumerate())


def test_every_server_gets_each_step_after_its_failures(stack: ExitStack) -> None:
    quick, quick_peer = started(stack)
    slow, slow_peer = started(stack, errors.UnknownJob("not yet"), errors.Unauthenticated("expired"))
    discarded: list[bool] = []
    credentials = Credentials(discard_token=lambda: discarded.append(True))
    sender = sender_to(quick_peer, slow_peer, credentials=credentials)
    for step in (4, 5):
        sender.send(step, [0.5, float("inf")])
        for server in (quick, slow):
            assert server.got.get(timeout=20) == ("job", 3, "me", 7, step, 0.5, float("inf"))
    assert discarded == [True]
    assert quick.got.empty()
    sender.close()
    wait_until(lambda: not sends_norms(), what="the end of the thread")


def test_a_server_that_takes_no_norms_is_told_of_after_some_seconds(stack: ExitStack) -> None:
    quick, quick_peer = started(stack)
    now = [100.0]
    failures = [errors.UnknownJob("\a no\nt here")] * 10_000
    _, failing_peer = started(stack, *failures)
    sender = sender_to(quick_peer, failing_peer, clock=lambda: now[0])
    stack.callback(sender.close)
    sender.send(4, [1.0])
    assert quick.got.get(timeout=20)
    assert sender.undelivered() == []
    now[0] += norm_sender.REPORT_AFTER_S
    wait_until(sender.undelivered, what="the norm that is not delivered")
    told = UndeliveredNorm("job", 3, failing_peer.server, norm_sender.REPORT_AFTER_S, "? no?t here")
    assert sender.undelivered() == [told]
    sender.send(5, [1.0])
    assert sender.undelivered() == [], "that step has just begun"
    sender.close()
    now[0] += norm_sender.REPORT_AFTER_S
    assert sender.undelivered() == []


def test_a_norm_that_is_taken_in_the_end_is_not_told_of(stack: ExitStack) -> None:
    now = [100.0]
    slow, peer = started(stack, errors.UnknownJob("not yet"))
    sender = sender_to(peer, clock=lambda: now[0])
    stack.callback(sender.close)
    sender.send(4, [1.0])
    assert slow.got.get(timeout=20)
    now[0] += norm_sender.REPORT_AFTER_S
    wait_until(lambda: not sender.undelivered(), what="the answer to the call")


def test_an_idle_sender_has_no_thread(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm_sender, "IDLE_S", 0.0)
    server, peer = started(stack)
    sender = sender_to(peer)
    for step in (0, 1):
        sender.send(step, [1.0])
        assert server.got.get(timeout=20)
        wait_until(lambda: not sends_norms(), what="the end of the thread")
    sender.close()


def test_a_sender_ends_while_a_server_does_not_answer(stack: ExitStack) -> None:
    other, peer = started(stack)
    sender = sender_to(Peer("gone", "127.0.0.1:1"), peer)
    sender.send(0, [1.0])
    assert other.got.get(timeout=20)
    sender.close()
    wait_until(lambda: not sends_norms(), what="the end of the thread")
    sender.send(1, [1.0])
    assert not sends_norms()
