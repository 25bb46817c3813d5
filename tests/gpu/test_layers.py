"""Layers on CuPy compared with the same layers on NumPy: values, gradients, statistics."""

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import DTypeLike

from shoal_nn import (
    GELU,
    AvgPool,
    BatchNorm,
    Conv2D,
    Dense,
    DepthwiseConv2D,
    Dropout,
    Embedding,
    Flatten,
    GlobalAvgPool,
    Layer,
    LayerNorm,
    MaxPool,
    ReLU,
    ReLU6,
    Sigmoid,
    Tanh,
    TrainingContext,
)
from shoal_worker.devices import Device

pytestmark = pytest.mark.gpu
IMAGES = (4, 9, 8, 6)
LAYERS = [
    (Dense(5), (4, 7)),
    (Conv2D(8), IMAGES),
    (Conv2D(8, window=5, strides=2, padding=2), IMAGES),
    (Conv2D(8, strides=2), IMAGES),
    (Conv2D(8, window=1, padding=0, strides=2), IMAGES),
    (Conv2D(9, groups=3), IMAGES),
    (DepthwiseConv2D(), IMAGES),
    (DepthwiseConv2D(multiplier=2, strides=2, padding=1), IMAGES),
    (BatchNorm(), IMAGES),
    (LayerNorm(), (4, 7)),
    *((pool, IMAGES) for pool in (MaxPool(3, strides=2, padding=1), AvgPool(2), GlobalAvgPool(), Flatten())),
    *((curve, (40, 50)) for curve in (ReLU(), ReLU6(), GELU(), GELU(approximate=True), Sigmoid(), Tanh())),
]


def step(layer: Layer, x: np.ndarray, place: Callable[[np.ndarray], Any], dtype: DTypeLike) -> dict[str, Any]:
    """Output, gradients and state of one step of training, on the host."""
    params, state = layer.init(np.random.default_rng(3), x.shape[1:])
    params = {name: place(value.astype(dtype)) for name, value in params.items()}
    state = {name: place(value.astype(dtype)) for name, value in state.items()}
    y, moved, pullback = layer.apply(params, state, place(x), TrainingContext(7))
    dy = np.random.default_rng(4).normal(size=y.shape).astype(dtype)
    found, dx = pullback(place(dy))
    return {"y": y, "dx": dx, **found, **moved}


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-4), (np.float64, 1e-10)])
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=repr)
def test_a_layer_is_the_same_on_both(
    device: Device, layer: Layer, shape: tuple[int, ...], dtype: DTypeLike, tolerance: float
) -> None:
    x = (3 * np.random.default_rng(1).normal(size=shape)).astype(dtype)
    there = step(layer, x, device.to_device, dtype)
    here = step(layer, x, lambda array: array, dtype)
    assert there.keys() == here.keys()
    for name, wanted in here.items():
        np.testing.assert_allclose(
            device.to_host(there[name]), wanted, rtol=tolerance, atol=tolerance * abs(wanted).max(), err_msg=name
        )


def test_an_embedding_is_the_same_on_both(device: Device) -> None:
    layer, numbers = Embedding(10, 4), np.array([[1, 2, 1], [9, 0, 1]])
    table = np.random.default_rng(3).normal(size=(10, 4)).astype(np.float32)
    [name] = layer.variables((3,))
    outcomes = []
    for place in (device.to_device, lambda array: array):
        y, _, pullback = layer.apply({name: place(table)}, {}, place(numbers), False)
        gradients, _ = pullback(place(np.ones((2, 3, 4), np.float32)))
        outcomes.append((y, gradients[name]))
    for there, here in zip(*outcomes, strict=True):
        np.testing.assert_allclose(device.to_host(there), here, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 0.01), ("bfloat16", 0.05)])
@pytest.mark.parametrize("layer", [Conv2D(8), Conv2D(8, window=5, strides=2, padding=2), Conv2D(9, groups=3)], ids=repr)
def test_a_convolution_of_halves_is_about_what_it_is_on_the_cpu(
    device: Device, layer: Layer, dtype: str, tolerance: float
) -> None:
    if dtype == "bfloat16" and int(device.xp.__version__.partition(".")[0]) < 14:
        pytest.skip("CuPy has bfloat16 from version 14 on")
    half = np.dtype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)
    x = np.random.default_rng(1).normal(size=IMAGES).astype(half)
    there = step(layer, x, device.to_device, half)
    here = step(layer, x, lambda array: array, half)
    assert there.keys() == here.keys()
    for name, wanted in here.items():
        found, exact = device.to_host(there[name]), wanted.astype(np.float32)
        assert found.dtype == half
        np.testing.assert_allclose(
            found.astype(np.float32), exact, rtol=tolerance, atol=tolerance * abs(exact).max(), err_msg=name
        )


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("layer", [ReLU(), BatchNorm(), Conv2D(8), MaxPool(3, strides=2, padding=1)], ids=repr)
def test_results_have_the_dtype_of_the_input(device: Device, layer: Layer, dtype: DTypeLike) -> None:
    x = device.to_device(np.random.default_rng(1).normal(size=IMAGES).astype(dtype))
    params, state = (
        {name: device.to_device(it) for name, it in its.items()}
        for its in layer.init(np.random.default_rng(3), IMAGES[1:])
    )
    y, _, pullback = layer.apply(params, state, x, TrainingContext(0))
    found, dx = pullback(y)
    assert y.dtype == dx.dtype == x.dtype
    assert {name: it.dtype for name, it in found.items()} == {name: it.dtype for name, it in params.items()}


def test_dropout_follows_from_the_seed_and_leaves_about_its_share(device: Device) -> None:
    x = device.to_device(np.ones((100, 200), np.float32))
    first, again, other = (
        device.to_host(Dropout(0.25).apply({}, {}, x, TrainingContext(seed, "a"))[0]) for seed in (7, 7, 8)
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any()
    assert set(np.unique(first)) == {np.float32(0), np.float32(1 / 0.75)}
    assert (first == 0).mean() == pytest.approx(0.25, abs=0.02)
