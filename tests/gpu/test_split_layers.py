"""Layers split over a GPU and the CPU, and over two GPUs, compared with those that are not split."""

import numpy as np
import pytest

from shoal_distribute import DeviceMesh, OneDeviceStrategy, keras
from shoal_worker.devices import Device

pytestmark = pytest.mark.gpu

layers = keras.layers
RNG = np.random.default_rng(0)
IDS, LABELS = RNG.integers(0, 1001, (256, 4)), RNG.normal(size=(256, 9))


def trained(devices: list[str], home: str) -> list[np.ndarray]:
    """Returns the variables after 32 steps of a model that is split over devices; without devices, it is not split."""
    strategy = OneDeviceStrategy(home)
    with strategy.scope():
        keras.utils.set_random_seed(3)
        if devices:
            mesh = DeviceMesh({"model": len(devices)}, devices)
            parts: list[keras.layers.Layer] = [
                layers.ParallelEmbedding(1001, 16, mesh=mesh, dtype="float64"),
                layers.Flatten(dtype="float64"),
                layers.ColumnParallelDense(129, "gelu", mesh=mesh, gather_output=False, dtype="float64"),
                layers.RowParallelDense(65, "tanh", mesh=mesh, input_is_parallel=True, dtype="float64"),
                layers.ColumnParallelDense(33, "softmax", mesh=mesh, dtype="float64"),
                layers.RowParallelDense(9, mesh=mesh, dtype="float64"),
            ]
        else:
            parts = [
                layers.Embedding(1001, 16, dtype="float64"),
                layers.Flatten(dtype="float64"),
                layers.Dense(129, "gelu", dtype="float64"),
                layers.Dense(65, "tanh", dtype="float64"),
                layers.Dense(33, "softmax", dtype="float64"),
                layers.Dense(9, dtype="float64"),
            ]
        model = keras.Sequential([keras.Input((4,)), *parts])
        model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.5), "mse")
    model.fit(IDS, LABELS, batch_size=64, epochs=8, shuffle=False, verbose=0)
    return model.get_weights()


def test_a_model_over_a_gpu_and_the_cpu_equals_one_that_is_not_split(device: Device) -> None:
    count = device.xp.cuda.runtime.getDeviceCount()
    wanted = trained([], "/cpu:0")
    placements = [(["/gpu:0"], "/gpu:0"), (["/gpu:0", "/cpu:0"], "/gpu:0"), (["/cpu:0", "/gpu:0"], "/cpu:0")]
    if count > 1:
        placements += [(["/gpu:0", "/gpu:1"], "/gpu:0"), (["/gpu:1", "/gpu:0"], "/gpu:0")]
    for devices, home in placements:
        for own, other in zip(trained(devices, home), wanted, strict=True):
            np.testing.assert_allclose(own, other, rtol=0, atol=1e-10)
