"""Strategies whose replicas are on a GPU, or on a GPU and the CPU."""

from collections.abc import Callable

import numpy as np
import pytest

from shoal import optim
from shoal_distribute import (
    CentralStorageStrategy,
    HierarchicalCopyAllReduce,
    MirroredStrategy,
    NcclAllReduce,
    PerReplica,
    ReduceOp,
    ReductionToOneDevice,
    RingAllReduce,
    Strategy,
    get_replica_context,
)

pytestmark = pytest.mark.gpu

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "gpu": lambda: MirroredStrategy(["/gpu:0"]),
    "nccl": lambda: MirroredStrategy(["/gpu:0"], NcclAllReduce()),
    "central": lambda: CentralStorageStrategy(["/gpu:0"]),
    "central on the gpu": lambda: CentralStorageStrategy(["/gpu:0", "/cpu:0"], "/gpu:0"),
    "mix by ring": lambda: MirroredStrategy(["/gpu:0", "/cpu:0"], RingAllReduce()),
    "mix by hierarchy": lambda: MirroredStrategy(["/cpu:0", "/gpu:0", "/cpu:1"], HierarchicalCopyAllReduce()),
    "mix by one device": lambda: MirroredStrategy(["/gpu:0", "/cpu:0"], ReductionToOneDevice()),
}


def train(strategy: Strategy) -> tuple[np.ndarray, list[float]]:
    """Trains least squares for 30 steps; returns the weights and the losses."""
    rng = np.random.default_rng(0)
    x, y, optimizer = rng.normal(size=(60, 4)), rng.normal(size=60), optim.Adam(0.05, clip_norm=1.0)
    weights = strategy.create_variable("w", rng.normal(size=4))

    def step(x: np.ndarray, y: np.ndarray) -> float:
        replica = get_replica_context()
        assert replica
        own_x, own_y = replica.device.put(x), replica.device.put(y)
        error = own_x @ weights.read() - own_y
        strategy.apply_gradients(optimizer, [(2 * own_x.T @ error / 60, weights)])
        return float((error**2).sum() / 60)

    parts = tuple(PerReplica(np.array_split(it, strategy.local_replicas)) for it in (x, y))
    losses = [strategy.reduce(ReduceOp.SUM, strategy.run(step, parts)) for _ in range(30)]
    return weights.numpy(), losses


@pytest.mark.usefixtures("device")  # skips the test without a GPU
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_equals_one_on_the_cpu(name: str) -> None:
    strategy = STRATEGIES[name]()
    with strategy.scope():
        weights, losses = train(strategy)
    strategy.close()
    expected, wanted = train(MirroredStrategy(["/cpu:0"]))
    np.testing.assert_allclose(weights, expected, rtol=1e-10)
    np.testing.assert_allclose(losses, wanted, rtol=1e-10)
