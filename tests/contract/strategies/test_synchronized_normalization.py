"""`BatchNormalization(synchronized=True)` in replicas and processes: equal to one replica with the whole batch."""

from collections.abc import Callable

import numpy as np
import pytest

from shoal import errors
from shoal_distribute import (
    CentralStorageStrategy,
    Group,
    MirroredStrategy,
    MultiWorkerMirroredStrategy,
    OneDeviceStrategy,
    Strategy,
    keras,
)
from shoal_distribute.collectives import CommunicationOptions
from shoal_distribute.pipeline.graph import Graph
from support.ranks import run_ranks, succeeded

RNG = np.random.default_rng(0)
X, Y = RNG.normal(2.0, 3.0, size=(39, 5, 4)), RNG.integers(0, 3, 39)  # batches of 13: uneven parts
WEIGHTS = [RNG.normal(size=(4, 6)), *RNG.uniform(0.5, 2, (4, 6)), RNG.normal(size=(30, 3)), np.zeros(3), np.ones(3)]


def trained(strategy: Strategy, x: np.ndarray = X, y: np.ndarray = Y, batch: int = 13) -> list[np.ndarray]:
    """Trains a model with two such layers in float64; returns its weights, the moving averages included."""
    with strategy.scope():
        layers = [
            keras.layers.Dense(6, use_bias=False, dtype="float64", name="hidden"),
            keras.layers.BatchNormalization(momentum=0.8, synchronized=True, dtype="float64", name="inner"),
            keras.layers.Activation("tanh", dtype="float64", name="bend"),
            keras.layers.Flatten(dtype="float64", name="flat"),
            keras.layers.Dense(3, use_bias=False, dtype="float64", name="head"),
            keras.layers.BatchNormalization(
                momentum=0.8, synchronized=True, center=False, scale=False, dtype="float64", name="outer"
            ),
        ]
        model = keras.Sequential([keras.Input((5, 4)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    model.set_weights(WEIGHTS)
    model.fit(x, y, batch_size=batch, epochs=4, shuffle=False, verbose=0)
    found = model.get_weights()
    strategy.close()
    return found


def check(found: list[np.ndarray]) -> None:
    expected = trained(OneDeviceStrategy("/cpu:0"))
    for own, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("make", [MirroredStrategy, CentralStorageStrategy])
@pytest.mark.parametrize("replicas", [2, 3])
def test_replicas_equal_one(make: Callable[[list[str]], Strategy], replicas: int) -> None:
    check(trained(make([f"/cpu:{number}" for number in range(replicas)])))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("devices", [[1, 1], [2, 1]])
def test_processes_equal_one(devices: list[int], overlap: bool) -> None:
    options = CommunicationOptions(bytes_per_pack=1)  # a bucket for each gradient: others are reduced at the same time

    def run(group: Group) -> list[np.ndarray]:
        names = [f"/cpu:{number}" for number in range(devices[group.rank])]
        strategy = MultiWorkerMirroredStrategy(None, options, devices=names, group=group, overlap=overlap)
        return trained(strategy)

    for found in succeeded(run_ranks(len(devices), run)):
        check(found)


def test_the_argument_is_kept_in_files() -> None:
    layer = keras.layers.BatchNormalization(synchronized=True)
    assert layer.get_config()["synchronized"]
    assert type(layer).from_config(layer.get_config()).joins_replicas


def test_pipelines_refuse_it() -> None:
    layer = keras.layers.BatchNormalization(synchronized=True, name="inner")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), layer])
    with pytest.raises(errors.InvalidLayer, match=r"layer inner .* leave out synchronized=True"):
        Graph(model)


def test_a_replica_without_samples_is_refused() -> None:
    strategy = MirroredStrategy(["/cpu:0", "/cpu:1"])
    with pytest.raises(
        errors.InvalidData, match=r"no samples in this batch, but layer inner joins .*drop_remainder=True"
    ):
        trained(strategy, X[:14], Y[:14])
