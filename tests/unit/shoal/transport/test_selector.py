"""The best transport that works is taken, a refusal is said once, and what broke is opened again, the best first."""

import gc
import weakref
from dataclasses import dataclass, field

import pytest
from structlog.testing import capture_logs

from shoal import errors
from shoal._system import Registry
from shoal._transport import registry
from shoal._transport.registry import register, registered, unregister
from shoal._transport.selector import Selector
from shoal._transport.transport import Target, Transport, TransportFactory, TransportUnavailable
from shoal.v1 import parameter_server_pb2 as pb

REFUSED = errors.Unreachable("a firewall")


class Opened(Transport):
    def __init__(self, name: str) -> None:
        self.name, self.over = name, False

    @property
    def broken(self) -> bool:
        return self.over

    def pull(self, request, pull_decoder):
        raise NotImplementedError

    push = commit = assign = pull

    def close(self) -> None:
        self.over = True


@dataclass
class Factory(TransportFactory):
    """Opens what it is told to: raises what `failing` holds."""

    name: str
    carrier: str = ""
    attaches: bool = True
    settings: frozenset[str] = frozenset({"test"})
    rank: int = 10
    failing: Exception | None = None
    tried: int = 0

    def __post_init__(self) -> None:
        self.carrier, self.title = self.carrier or self.name, self.name.upper()

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
def factories(monkeypatch):
    """The best, one on the same carrier, and the one that is always there."""
    found = (
        Factory("best", carrier="wire", rank=10),
        Factory("good", carrier="wire", rank=20),
        Factory("last", attaches=False, rank=30),
    )
    monkeypatch.setattr(registry, "_registry", Registry("shoal.tests"))
    for factory in reversed(found):
        register(factory)
    return found


@pytest.fixture
def rpc():
    return Rpc()


def opened(selector, rpc):
    return selector.open(Target("server:1", [], rpc), 2).name


def test_the_best_is_taken(factories, rpc):
    assert opened(Selector("test"), rpc) == "best"
    assert [it.tried for it in factories] == [1, 0, 0]


def test_the_server_is_asked_once_what_it_offers(factories, rpc):
    factories[0].failing = TransportUnavailable("not here")
    assert opened(Selector("test"), rpc) == "good"
    assert rpc.asked == 1


def test_a_server_that_does_not_say_what_it_offers_is_no_refusal(factories, rpc):
    selector, rpc.failing = Selector("test"), errors.Unreachable("gone")
    with pytest.raises(errors.Unreachable, match="gone"):
        opened(selector, rpc)
    rpc.failing = None
    assert opened(selector, rpc) == "best"


def test_what_is_unavailable_is_passed_over_in_silence_and_tried_again(factories, rpc):
    factories[0].failing = TransportUnavailable("not here")
    selector = Selector("test")
    with capture_logs() as logs:
        assert [opened(selector, rpc) for _ in range(2)] == ["good", "good"]
    assert factories[0].tried == 2
    assert not logs


def test_a_carrier_that_is_not_offered_is_not_tried_again(factories, rpc):
    factories[0].failing = TransportUnavailable("not here", for_good=True)
    selector = Selector("test")
    assert [opened(selector, rpc) for _ in range(2)] == ["last", "last"]
    assert [it.tried for it in factories] == [1, 0, 2]
    assert rpc.asked == 1


def test_a_refusal_refuses_all_on_its_carrier_and_is_said_once(factories, rpc):
    factories[0].failing = REFUSED
    selector = Selector("test")
    with capture_logs() as logs:
        assert [opened(selector, rpc) for _ in range(2)] == ["last", "last"]
    assert [it.tried for it in factories] == [1, 0, 2]
    [log] = logs
    assert log["event"] == "no wire to a server; its calls go by LAST, slower"
    assert (log["server"], log["why"]) == ("server:1", "a firewall")


def test_a_refusal_keeps_nothing_of_its_call(factories, rpc):
    """By its traceback an error leads to the calls that it went through, and so to memory that others share."""

    class Memory:
        pass

    def call():
        memory = Memory()
        held.append(weakref.ref(memory))
        factories[0].failing = errors.Unreachable("a firewall")
        opened(Selector("test"), rpc)
        factories[0].failing = None

    held = []
    gc.disable()
    try:
        call()
        assert held[0]() is None
    finally:
        gc.enable()


def test_where_nothing_is_left_the_last_refusal_is_raised_and_all_are_tried_again(factories, rpc):
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


def test_what_broke_is_due():
    selector, transport = Selector("auto"), Opened("any")
    assert selector.due(None)
    assert not selector.due(transport)
    transport.close()
    assert selector.due(transport)


def test_registering_by_rank_in_place_of_one_and_not_at_all(factories):
    def names():
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


def test_the_order_of_preference():
    def names(setting):
        return [it.name for it in registered(setting)]

    assert names("auto") == ["shared_memory", "lane", "grpc"]
    assert names("tcp") == ["lane", "grpc"]
    assert names("grpc") == ["grpc"]
