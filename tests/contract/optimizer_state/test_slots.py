"""Slots on the wire: given to the shards of a new job, and read from those of a running one."""

from typing import Any

import numpy as np
import pytest

from shoal import errors, optim
from shoal.optim import OptimizerState, checked_state
from shoal.partitioners import FixedShards
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable
from support.clusters.shard_servers import ShardServers
from support.training.optimizer_states import same_state

DRAW = np.random.default_rng(0)
SHAPES = {"split": (30, 4), "w": (5,), "half": (6,), "scalar": ()}
DTYPES: dict[str, Any] = {"split": np.float64, "w": np.float32, "half": np.float16, "scalar": np.float64}


def arrays() -> dict[str, np.ndarray]:
    return {name: DRAW.normal(size=shape).astype(DTYPES[name]) for name, shape in SHAPES.items()}


def variables() -> dict[str, Variable]:
    cut = {"split": FixedShards(3)}
    trained = {name: Variable.of(it, partitioner=cut.get(name)) for name, it in arrays().items()}
    return {**trained, "counter": Variable.of(np.zeros(2, np.int64), trainable=False)}


def state(optimizer: optim.Optimizer, known: dict[str, Variable]) -> OptimizerState:
    slots = {slot: {name: abs(it) for name, it in arrays().items()} for slot in optimizer.slots}
    return checked_state(OptimizerState(slots, 41), optimizer, known)


@pytest.mark.parametrize(
    "optimizer", [optim.Momentum(), optim.Adam(), optim.RMSProp(centered=True)], ids=lambda it: it.name
)
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("transport", ["grpc", "tcp"])
def test_what_is_given_is_read(optimizer: optim.Optimizer, servers: int, transport: str) -> None:
    """The wire dtype is that of values: slots lose nothing."""
    known = variables()
    given = state(optimizer, known)
    with ShardServers(known, servers=servers, shards=4, optimizer=optimizer, transport=transport, wire="float16") as it:
        with it.client("", 0) as reader:
            reader.assign({}, given)
            assert same_state(reader.optimizer_state(optimizer.slots), given)
            assert reader.pull()["counter"].tolist() == [0, 0]
        with it.worker("me") as worker:
            worker.pull()
            assert worker.updates == 41
            assert same_state(worker.optimizer_state(optimizer.slots), given)
            worker.push({name: np.zeros(SHAPES[name], DTYPES[name]) for name in SHAPES})
            assert worker.optimizer_state(optimizer.slots).updates == 42


def test_an_optimizer_without_slots_has_its_updates() -> None:
    with ShardServers({"w": np.zeros(3)}) as it, it.client("", 0) as reader:
        reader.assign({}, OptimizerState(updates=5))
        assert reader.optimizer_state(()) == OptimizerState({}, 5)


def test_schedules_count_from_the_given_updates() -> None:
    rates = optim.StepLR(1.0, step_size=10, gamma=0.5)
    with ShardServers({"w": np.zeros(3)}, optimizer=optim.SGD(rates)) as it:
        with it.client("", 0) as reader:
            reader.assign({}, OptimizerState(updates=10))
        with it.worker("me") as worker:
            worker.pull()
            worker.push({"w": np.ones(3)})
            assert worker.pull()["w"].tolist() == [-0.5, -0.5, -0.5]


class TestRefused:
    def test_a_state_after_training_has_begun(self) -> None:
        with ShardServers({"w": np.zeros(3)}, optimizer=optim.Momentum()) as it, it.worker("me") as worker:
            worker.pull()
            with it.client("", 0) as reader, pytest.raises(errors.BadRequest, match="training has begun"):
                reader.assign({}, OptimizerState({"momentum_buffer": {"w": np.ones(3)}}, 3))
            assert worker.optimizer_state(["momentum_buffer"]).slots["momentum_buffer"]["w"].tolist() == [0, 0, 0]

    @pytest.mark.parametrize(
        ("given", "error", "said"),
        [
            (OptimizerState({"momentum": {"w": np.ones(3)}}), errors.BadRequest, "no slot 'momentum'; it has exp_avg,"),
            (OptimizerState({"exp_avg_sq": {"w": -np.ones(3)}}), errors.BadRequest, "has a value below 0; correct it"),
            (
                OptimizerState({"exp_avg": {"w": np.full(3, np.inf)}}),
                errors.NonFiniteGradient,
                "the initial exp_avg of 'w' contain inf",
            ),
            (OptimizerState({"exp_avg": {"w": np.ones(2)}}), errors.InvalidGradient, r"has shape \(2,\), not \(3,\)"),
        ],
    )
    def test_by_the_servers(self, given: OptimizerState, error: type[Exception], said: str) -> None:
        """Whatever the client has checked."""
        with ShardServers({"w": np.zeros(3)}, optimizer=optim.Adam()) as it, it.client("", 0) as reader:
            with pytest.raises(error, match=said):
                reader.assign({}, given)
            slots = reader.optimizer_state(optim.Adam().slots).slots
            assert not any(array.any() for arrays in slots.values() for array in arrays.values())

    def test_too_many_updates(self) -> None:
        with ShardServers({"w": np.zeros(3)}) as it, it.client("", 0) as reader:
            with pytest.raises(errors.BadRequest, match="out of range"):
                reader.pusher.assign({"w": np.zeros(3)}, 0, 2**53)
            assert reader.optimizer_state(()).updates == 0

    def test_slots_on_a_lane(self) -> None:
        servers = ShardServers({"w": np.zeros(3)}, optimizer=optim.Momentum(), transport="tcp")
        with servers as it, it.client("", 0) as reader:
            reader.pull()
            (connection,) = reader.servers.connections
            stamp = reader.servers.stamp(0)
            request = pb.PullRequest(stamp=stamp, shards=connection.indices, slot="momentum_buffer")
            with pytest.raises(errors.BadRequest, match="pull slots by gRPC"):
                connection.pull(request, None)


def test_a_slow_reader_of_slots_sees_one_version() -> None:
    """An update leaves it the memory, which counts as that of a reader."""
    with ShardServers({"w": np.zeros(3)}, shards=1, optimizer=optim.Momentum()) as it, it.worker("me") as worker:
        group = it.stores[0].hosted.group("job", 1, [0])
        worker.pull()
        with group.read(group.select([0], "momentum_buffer"), slot="momentum_buffer") as reading:
            worker.push({"w": np.ones(3)})
            worker.pull()
            (slab,) = reading.values
            assert slab.tolist() == [0, 0, 0]
        assert worker.optimizer_state(["momentum_buffer"]).slots["momentum_buffer"]["w"].tolist() == [1, 1, 1]
