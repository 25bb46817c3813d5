"""Selector of transports: it takes the best that works, logs a refusal once, and reopens transports best first."""

import gc
import weakref
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
from structlog.testing import capture_logs

from shoal import errors
from shoal._system import Registry
from shoal._transport import registry
from shoal._transport.grpc_calls import GrpcCalls
from shoal._transport.registry import register, registered, unregister
from shoal._transport.selector import Selector
from shoal._transport.transport import Target, Transport, TransportFactory, TransportUnavailable
from shoal._wire.slabs import CallLayout
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb

REFUSED = errors.Unreachable("a firewall")


class Opened(Transport):
    def __init__(self, name: str) -> None:
        self.name, self.over = name, False

    @property
    def broken(self) -> bool:
        return self.over

    def pull(self, *_: object) -> list[header_pb2.ShardHeader]:
        raise NotImplementedError

    def push(self, *_: object) -> pb.PushReply:
        raise NotImplementedError

    def commit(self, *_: object) -> pb.PushReply:
        raise NotImplementedError

    def assign(self, *_: object) -> None:
        raise NotImplementedError

    def close(self) -> None:
        self.over = True


class FakeClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Factory(TransportFactory):
    """Opens transports that do nothing, or raises `failing`."""

    def __init__(self, name: str, carrier: str = "", *, attaches: bool = True, rank: int = 10) -> None:
        attributes = {"name": name, "title": name.upper(), "carrier": carrier or name, "attaches": attaches}
        vars(self).update(attributes, rank=rank, settings=frozenset({"test"}))
        self.failing: Exception | None = None
        self.tried = 0

    def open(self, target: Target, loads: int) -> Opened:
        self.tried += 1
        if self.failing:
            raise self.failing
        return Opened(self.name)


@dataclass
class Rpc:
    """What every server answers."""

    asked: int = 0
    failing: Exception | None = None
    offer: pb.AttachReply = field(default_factory=lambda: pb.AttachReply(address="lanes:1"))

    def attach(self) -> pb.AttachReply:
        self.asked += 1
        if self.failing:
            raise self.failing
        return self.offer


@pytest.fixture
def factories(monkeypatch: pytest.MonkeyPatch) -> tuple[Factory, Factory, Factory]:
    """The best, one on the same carrier, and the one that is always there."""
    found = (
        Factory("best", carrier="wire", rank=10),
        Factory("good", carrier="wire", rank=20),
        Factory("last", attaches=False, rank=30),
    )
    monkeypatch.setattr(registry, "TRANSPORTS", Registry("shoal.tests"))
    for factory in reversed(found):
        register(factory)
    return found


@pytest.fixture
def rpc() -> Rpc:
    return Rpc()


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def target(rpc: Rpc) -> Target:
    return Target("server:1", CallLayout([]), cast(GrpcCalls, rpc))


def opened(selector: Selector, rpc: Rpc) -> str:
    transport = selector.open(target(rpc), 2)
    assert isinstance(transport, Opened)
    return transport.name


def tried_at(selector: Selector, current: Transport, clock: FakeClock, until: float) -> list[float]:
    """The seconds at which refused transports are tried again, in vain, while calls go on ten times a second."""
    found = []
    begun = clock.now
    while clock.now < begun + until:
        if selector.again(current):
            found.append(round(clock.now - begun, 1))
        clock.now += 0.1
    return found


def test_the_best_is_taken(factories: tuple[Factory, Factory, Factory], rpc: Rpc) -> None:
    assert opened(Selector("test"), rpc) == "best"
    assert [it.tried for it in factories] == [1, 0, 0]


def test_selector_requests_the_offer_once(factories: tuple[Factory, Factory, Factory], rpc: Rpc) -> None:
    factories[0].failing = TransportUnavailable("not here")
    assert opened(Selector("test"), rpc) == "good"
    assert rpc.asked == 1


def test_failed_offer_does_not_count_as_a_refusal(factories: tuple[Factory, Factory, Factory], rpc: Rpc) -> None:
    selector, rpc.failing = Selector("test"), errors.Unreachable("gone")
    with pytest.raises(errors.Unreachable, match="gone"):
        opened(selector, rpc)
    rpc.failing = None
    assert opened(selector, rpc) == "best"


def test_unavailable_transport_is_skipped_silently_and_tried_again(
    factories: tuple[Factory, Factory, Factory], rpc: Rpc
) -> None:
    factories[0].failing = TransportUnavailable("not here")
    selector = Selector("test")
    with capture_logs() as logs:
        assert [opened(selector, rpc) for _ in range(2)] == ["good", "good"]
    assert factories[0].tried == 2
    assert not logs


def test_a_carrier_that_is_not_offered_is_not_tried_again(
    factories: tuple[Factory, Factory, Factory], rpc: Rpc
) -> None:
    factories[0].failing = TransportUnavailable("not here", for_good=True)
    selector = Selector("test")
    assert [opened(selector, rpc) for _ in range(2)] == ["last", "last"]
    assert [it.tried for it in factories] == [1, 0, 2]
    assert rpc.asked == 1


def test_refusal_excludes_its_carrier_and_is_logged_once(factories: tuple[Factory, Factory, Factory], rpc: Rpc) -> None:
    factories[0].failing = REFUSED
    selector = Selector("test")
    with capture_logs() as logs:
        assert [opened(selector, rpc) for _ in range(2)] == ["last", "last"]
    assert [it.tried for it in factories] == [1, 0, 2]
    [log] = logs
    assert log["event"] == "no wire to a server; calls to it use LAST, which is slower"
    assert (log["server"], log["why"]) == ("server:1", "a firewall")


def test_a_refused_carrier_is_tried_again_after_pauses_that_double(
    factories: tuple[Factory, Factory, Factory], rpc: Rpc, clock: FakeClock
) -> None:
    factories[0].failing = REFUSED
    selector = Selector("test", clock, lambda: 0.0)
    current = selector.open(target(rpc), 2)
    intervals = np.diff([0.0, *tried_at(selector, current, clock, 1500)])
    np.testing.assert_allclose(intervals, [5, 10, 20, 40, 80, 160, 300, 300, 300], atol=0.2)


def test_the_transport_that_works_again_is_opened_in_order(
    factories: tuple[Factory, Factory, Factory], rpc: Rpc, clock: FakeClock
) -> None:
    factories[0].failing = factories[1].failing = REFUSED
    selector = Selector("test", clock, lambda: 0.0)
    current = selector.open(target(rpc), 2)
    clock.now += 5
    again = selector.again(current)
    assert again == [*factories[:2]]
    assert selector.open_first(again, target(rpc), 2) is None
    factories[1].failing = None
    clock.now += 10
    better = selector.open_first(selector.again(current), target(rpc), 2)
    assert isinstance(better, Opened)
    assert better.name == "good"
    assert selector.place(better) < selector.place(current)
    clock.now += 20
    assert selector.again(better) == [factories[0]]
    factories[0].failing = None
    best = selector.open_first([factories[0]], target(rpc), 2)
    assert best is not None
    clock.now += 1000
    assert selector.again(best) == []


def test_a_failed_offer_ends_an_attempt(
    factories: tuple[Factory, Factory, Factory], rpc: Rpc, clock: FakeClock
) -> None:
    factories[0].failing = REFUSED
    selector = Selector("test", clock, lambda: 0.0)
    current = selector.open(target(rpc), 2)
    rpc.failing = errors.Unreachable("gone")
    clock.now += 5
    assert selector.open_first(selector.again(current), target(rpc), 2) is None
    assert selector.again(current) == []  # the next pause


def test_what_is_missing_for_good_or_not_at_all_refused_is_not_tried_again(
    factories: tuple[Factory, Factory, Factory], rpc: Rpc, clock: FakeClock
) -> None:
    for reason in (TransportUnavailable("not here"), TransportUnavailable("no lanes", for_good=True)):
        factories[0].failing = reason
        selector = Selector("test", clock)
        current = selector.open(target(rpc), 2)
        clock.now += 1000
        assert selector.again(current) == []


def test_a_transport_whose_reason_may_pass_is_tried_again(
    factories: tuple[Factory, Factory, Factory], rpc: Rpc, clock: FakeClock
) -> None:
    factories[0].failing = TransportUnavailable("memory is full", passing=True)
    selector = Selector("test", clock, lambda: 0.0)
    current = selector.open(target(rpc), 2)
    assert selector.again(current) == []
    clock.now += 5
    assert selector.again(current) == [factories[0]]


def test_a_transport_that_lost_its_memory_is_opened_again(
    factories: tuple[Factory, Factory, Factory], rpc: Rpc, clock: FakeClock
) -> None:
    selector = Selector("test", clock, lambda: 0.0)
    current = selector.open(target(rpc), 2)
    current.lost = "it was truncated"
    assert tried_at(selector, current, clock, 16) == pytest.approx([5, 15], abs=0.2)


def test_after_a_break_a_refused_carrier_is_tried_when_its_pause_is_over(
    factories: tuple[Factory, Factory, Factory], rpc: Rpc, clock: FakeClock
) -> None:
    factories[0].failing = REFUSED
    selector = Selector("test", clock, lambda: 0.0)
    assert opened(selector, rpc) == "last"
    factories[0].failing = None
    assert opened(selector, rpc) == "last"
    clock.now += 5
    assert opened(selector, rpc) == "best"


def test_a_refusal_keeps_nothing_of_its_call(factories: tuple[Factory, Factory, Factory], rpc: Rpc) -> None:
    """An error's traceback keeps the frames of its calls alive, and so the shared memory that they use."""

    class Memory:
        pass

    def call() -> None:
        memory = Memory()
        held.append(weakref.ref(memory))
        factories[0].failing = errors.Unreachable("a firewall")
        opened(Selector("test"), rpc)
        factories[0].failing = None

    held: list[weakref.ref[Memory]] = []
    gc.disable()
    try:
        call()
        assert held[0]() is None
    finally:
        gc.enable()


def test_last_refusal_is_raised_and_all_transports_are_tried_again(
    factories: tuple[Factory, Factory, Factory], rpc: Rpc
) -> None:
    for factory in factories:
        factory.failing = REFUSED
    selector = Selector("test")
    for tried in (1, 2):
        with pytest.raises(errors.Unreachable, match="a firewall"):
            opened(selector, rpc)
        assert factories[2].tried == tried
    for factory in factories:
        factory.failing = TransportUnavailable("not here")
    with pytest.raises(errors.Unreachable, match=r"no transport for this client \(.*not here; .*not here.*\)"):
        opened(selector, rpc)


def test_broken_transport_is_due_for_replacement() -> None:
    selector, transport = Selector("auto"), Opened("any")
    assert selector.due(None)
    assert not selector.due(transport)
    transport.close()
    assert selector.due(transport)


def test_registering_by_rank_in_place_of_one_and_not_at_all(factories: tuple[Factory, Factory, Factory]) -> None:
    def names() -> list[str]:
        return [it.name for it in registered("test")]

    register(Factory("new", rank=15))
    assert names() == ["best", "new", "good", "last"]
    register(Factory("best", rank=40))
    assert names() == ["new", "good", "last", "best"]
    unregister("new")
    unregister("new")
    assert names() == ["good", "last", "best"]
    with pytest.raises(errors.BadRequest, match="no transport is registered for 'none'; choose one of test"):
        registered("none")


def test_the_order_of_preference() -> None:
    def names(setting: str) -> list[str]:
        return [it.name for it in registered(setting)]

    assert names("auto") == ["shared_memory", "lane", "grpc"]
    assert names("tcp") == ["lane", "grpc"]
    assert names("grpc") == ["grpc"]
