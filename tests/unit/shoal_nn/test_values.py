"""Values of layers, which are compared with written-out definitions; running statistics; and the seed of Dropout."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import Generator

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
    LayerNorm,
    MaxPool,
    ReLU,
    ReLU6,
    Residual,
    Sequential,
    Sigmoid,
    Tanh,
    TrainingContext,
    pooling,
)
from shoal_nn._ops import arithmetic, channels, convolve, windows
from shoal_nn._ops import depthwise as compiled
from shoal_nn._ops.error_function import erf
from shoal_nn._ops.windows import Padding, windows_over
from shoal_nn.layer import Layer, Train
from support.devices.gradient_check import prepared, seeds, twenty

# As `Padding` of the layers, but with all four sides where it is not a word.
ExplicitPadding = Literal["same", "valid"] | tuple[tuple[int, int], tuple[int, int]]

WORDS: list[Literal["same", "valid"]] = ["same", "valid"]

small = st.integers(1, 3)
pairs = st.tuples(small, small)
sides = st.tuples(st.integers(0, 2), st.integers(0, 2))


def value(layer: Layer, x: np.ndarray, seed: int = 0) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, Any]]:
    params, state = prepared(layer, np.random.default_rng(seed), x.shape[1:])
    return layer.apply(params, state, x, False)[0], params, state


def padded(
    x: np.ndarray,
    window: tuple[int, int],
    strides: tuple[int, int],
    padding: ExplicitPadding,
    filling: float = 0.0,
) -> np.ndarray:
    """Images with what is around them, as TensorFlow's guide to padding and PyTorch's pages define it."""
    if padding == "valid":
        around = [(0, 0), (0, 0)]
    elif padding == "same":
        around = []
        for length, size, stride in zip(x.shape[1:3], window, strides, strict=True):
            total = max(size - (stride if length % stride == 0 else length % stride), 0)
            around.append((total // 2, total - total // 2))
    else:
        around = [*padding]
    return np.pad(x, [(0, 0), *around, (0, 0)], constant_values=filling)


def each_window(
    x: np.ndarray, window: tuple[int, int], strides: tuple[int, int]
) -> Iterator[tuple[int, int, np.ndarray]]:
    """The windows of padded images by their place in the output, one by one."""
    (height, width), (down, across) = window, strides
    for i, top in enumerate(range(0, x.shape[1] - height + 1, down)):
        for j, left in enumerate(range(0, x.shape[2] - width + 1, across)):
            yield i, j, x[:, top : top + height, left : left + width]


@twenty
@given(seeds, small, pairs, pairs, pairs, st.just("same") | st.just("valid") | st.tuples(sides, sides), pairs, small)
def test_a_convolution_is_the_sum_over_each_window(
    rng: Generator,
    batch: int,
    size: tuple[int, int],
    window: tuple[int, int],
    strides: tuple[int, int],
    padding: ExplicitPadding,
    channels: tuple[int, int],
    groups: int,
) -> None:
    inputs, filters = channels
    x = rng.standard_normal((batch, size[0] + 2, size[1] + 2, groups * inputs))
    layer = Conv2D(groups * filters, groups=groups, window=window, strides=strides, padding=padding)
    y, params, _ = value(layer, x)
    for i, j, part in each_window(padded(x, window, strides, padding), window, strides):
        for group in range(groups):
            seen = part[..., group * inputs : (group + 1) * inputs]
            mine = slice(group * filters, (group + 1) * filters)
            wanted = np.einsum("nhwc,hwcf->nf", seen, params["kernel"][..., mine]) + params["bias"][mine]
            np.testing.assert_allclose(y[:, i, j, mine], wanted, rtol=1e-12, atol=1e-12)
    assert y.shape[1:3] == (i + 1, j + 1)


@twenty
@given(seeds, pairs, pairs, small, small)
def test_depthwise_is_a_group_for_each_channel(
    rng: Generator, window: tuple[int, int], strides: tuple[int, int], channels: int, multiplier: int
) -> None:
    x = rng.standard_normal((2, 4, 5, channels))
    depthwise = DepthwiseConv2D(multiplier, window=window, strides=strides)
    grouped = Conv2D(channels * multiplier, groups=channels, window=window, strides=strides)
    params, _ = prepared(depthwise, rng, x.shape[1:])
    assert {name: kept.shape for name, kept in params.items()} == {
        name: kept.shape for name, kept in grouped.variables(x.shape[1:]).items()
    }
    y = depthwise.apply(params, {}, x, False)[0]
    np.testing.assert_allclose(y, grouped.apply(params, {}, x, False)[0], rtol=1e-12, atol=1e-12)
    kernel, last = params["kernel"], channels * multiplier - 1
    alone = Conv2D(1, window=window, strides=strides, bias=False)
    wanted = alone.apply({"kernel": kernel[..., last:]}, {}, x[..., -1:], False)[0] + params["bias"][last]
    np.testing.assert_allclose(y[..., last:], wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-12), (np.float32, 1e-5), (np.float16, 1e-2)])
@twenty
@given(data=st.data())
def test_compiled_depthwise_equals_the_array_version(
    dtype: type[np.floating], tolerance: float, data: st.DataObject
) -> None:
    rng, channels = data.draw(seeds), data.draw(small)
    window, strides = data.draw(pairs), data.draw(pairs)
    paddings: list[Padding] = ["same", 0, 2, ((2, 0), (0, 1))]
    over = windows_over((4, 5), window, strides, data.draw(st.sampled_from(paddings)))
    if min(over.outputs) < 1:
        return
    x, kernel = rng.standard_normal((3, 4, 5, channels)), rng.standard_normal((*over.window, channels))
    dy = rng.standard_normal((3, *over.outputs, channels))
    x, kernel, dy = x.astype(dtype)[:, ::-1], kernel.astype(np.float32), dy.astype(dtype)
    x.flags.writeable = False
    found = compiled.convolve_each(x, kernel, over), *compiled.gradients_each(x, kernel, dy, over, True)
    wanted = convolve.convolve_each(x, kernel, over), *convolve.gradients_each(x, kernel, dy, over, True)
    for got, want in zip(found, wanted, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * 10)
    assert compiled.gradients_each(x, kernel, dy, over, False)[1] is None


def test_a_convolution_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((5, 6, 6, 4)).astype(np.float32)
    layers = [Conv2D(3), Conv2D(3, strides=2), Conv2D(4, groups=2), DepthwiseConv2D(2), DepthwiseConv2D(strides=2)]
    whole = [everything(layer, x) for layer in layers]
    monkeypatch.setattr(convolve, "blocks", lambda *_: [slice(0, 2), slice(2, 4), slice(4, 5)])
    for layer, wanted in zip(layers, whole, strict=True):
        for got, want in zip(everything(layer, x), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_blocks_fit_the_cache_and_hold_at_least_a_sample() -> None:
    half = windows.BLOCK // 2
    assert list(windows.blocks(np, 5, half)) == [slice(0, 2), slice(2, 4), slice(4, 5)]
    assert list(windows.blocks(np, 2, 10 * half)) == [slice(0, 1), slice(1, 2)]
    assert list(windows.blocks(np, 5, half, least=8 * half)) == [slice(0, 5)]
    assert list(windows.blocks(None, 5, half)) == [slice(0, 5)]
    assert list(windows.blocks(np, 0, half)) == []


def everything(layer: Layer, x: np.ndarray) -> tuple[np.ndarray, ...]:
    """The value and all gradients, in float32."""
    params, state = layer.init(np.random.default_rng(3), x.shape[1:])
    y, _, pullback = layer.apply(params, state, x, False)
    dparams, dx = pullback(np.cos(y))
    return y, *dparams.values(), dx


def test_batch_norm_of_many_values_away_from_0_is_near() -> None:
    x = 100 + 0.1 * np.random.default_rng(0).standard_normal((2**20, 2), np.float32)
    layer = BatchNorm(momentum=1)
    params, state = layer.init(np.random.default_rng(0), (2,))
    y, after, _ = layer.apply(params, state, x, TrainingContext(0))
    wide = x.astype(np.float64)
    np.testing.assert_allclose(after["mean"], wide.mean(axis=0), rtol=2e-7)
    np.testing.assert_allclose(after["var"], wide.var(axis=0, ddof=1), rtol=1e-5)
    # The mean itself is rounded to 100 * 2^-24, which is this much of a standard deviation.
    np.testing.assert_allclose(y, (wide - wide.mean(axis=0)) / np.sqrt(wide.var(axis=0) + 1e-5), atol=1e-4)


def test_one_value_a_channel_is_normalized_by_the_running_statistics_and_leaves_them() -> None:
    layer, x = BatchNorm(), np.array([[2.0, -1.0, 0.5]])
    params, state = prepared(layer, np.random.default_rng(0), (3,))
    y, after, pullback = layer.apply(params, state, x, TrainingContext(0))
    expected, _, pull = layer.apply(params, state, x, False)
    np.testing.assert_array_equal(y, expected)
    assert after == state
    found, dx = pullback(x)
    assert found.keys() == params.keys()
    np.testing.assert_array_equal(dx, pull(x)[1])


def test_int16_is_no_half() -> None:
    assert [arithmetic.is_half(np.dtype(it)) for it in ("float16", ml_dtypes.bfloat16, "int16", "uint16")] == [
        True,
        True,
        False,
        False,
    ]


def test_a_normalization_in_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).standard_normal((9, 32, 32, 8)).astype(np.float32)
    whole = normalized(x)
    monkeypatch.setattr(channels, "blocks", lambda *_: [slice(0, 100), slice(100, 250), slice(250, 288)])
    for got, want in zip(normalized(x), whole, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_the_largest_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(0).integers(0, 3, (5, 6, 6, 4)).astype(np.float32)  # with ties
    whole = everything(MaxPool(3, strides=2), x)
    monkeypatch.setattr(pooling, "blocks", lambda *_: [slice(0, 2), slice(2, 5)])
    for got, want in zip(everything(MaxPool(3, strides=2), x), whole, strict=True):
        np.testing.assert_array_equal(got, want)


def normalized(x: np.ndarray) -> tuple[np.ndarray, ...]:
    """The value, all gradients and the running statistics, in training."""
    params, state = prepared(BatchNorm(), np.random.default_rng(3), x.shape[1:])
    y, moved, pullback = BatchNorm().apply(params, state, x, TrainingContext(0))
    dparams, dx = pullback(np.cos(y))
    return y, *dparams.values(), dx, *moved.values()


def test_the_first_layer_need_not_look_for_dx() -> None:
    x = np.ones((2, 4, 4, 3), np.float32)
    for layer in (Conv2D(6, groups=3), Conv2D(2), DepthwiseConv2D(2)):
        first = type(layer)(**{**vars(layer), "input_gradient": False})
        params, _ = layer.init(np.random.default_rng(0), x.shape[1:])
        (wanted, dx), (found, none) = (
            each.apply(params, {}, x, False)[2](np.ones((2, 4, 4, 6 if layer != Conv2D(2) else 2), np.float32))
            for each in (layer, first)
        )
        assert none is None
        assert dx.shape == x.shape
        np.testing.assert_array_equal(found["kernel"], wanted["kernel"])


@pytest.mark.parametrize("counting", [True, False])
@twenty
@given(data=st.data())
def test_pooling_takes_the_largest_or_the_mean_of_each_window(counting: bool, data: st.DataObject) -> None:
    rng, window, strides = data.draw(seeds), data.draw(pairs), data.draw(pairs)
    rows, columns = (st.integers(0, size - 1) for size in window)
    around = st.tuples(st.tuples(rows, rows), st.tuples(columns, columns))
    padding: ExplicitPadding = data.draw(st.sampled_from(WORDS) | around)
    x = rng.standard_normal((2, 4, 5, 2))
    largest, _, _ = value(MaxPool(window, strides, padding), x)
    mean, _, _ = value(AvgPool(window, strides, padding, counting), x)
    for i, j, part in each_window(padded(x, window, strides, padding, np.nan), window, strides):
        np.testing.assert_array_equal(largest[:, i, j], np.nanmax(part, axis=(1, 2)))
        wanted = np.nan_to_num(part).mean(axis=(1, 2)) if counting else np.nanmean(part, axis=(1, 2))
        np.testing.assert_allclose(mean[:, i, j], wanted, rtol=1e-12, atol=1e-12)
    assert largest.shape == mean.shape == (2, i + 1, j + 1, 2)


def test_of_several_largest_elements_the_first_gets_the_gradient() -> None:
    x = np.zeros((1, 2, 2, 1))
    _, _, pullback = MaxPool(2).apply({}, {}, x, False)
    np.testing.assert_array_equal(pullback(np.full((1, 1, 1, 1), 3.0))[1].reshape(-1), [3, 0, 0, 0])


def test_dense_embedding_and_layers_that_remove_axes() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 4))
    y, params, _ = value(Dense(5), x)
    np.testing.assert_allclose(y, np.einsum("nti,iu->ntu", x, params["kernel"]) + params["bias"])
    ids = np.array([[0, 2], [2, 2]])
    y, params, _ = value(Embedding(3, 4), ids)
    np.testing.assert_array_equal(y[1, 0], params["table"][2])
    np.testing.assert_allclose(value(GlobalAvgPool(), x)[0], x.mean(axis=1))
    np.testing.assert_array_equal(value(Flatten(), x)[0], x.reshape(2, 12))


def test_activations() -> None:
    x = np.linspace(-8, 8, 33)[None]
    normal = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in x[0]])[None]
    np.testing.assert_array_equal(value(ReLU(), x)[0], np.where(x > 0, x, 0))
    np.testing.assert_array_equal(value(ReLU6(), x)[0], np.clip(x, 0, 6))
    np.testing.assert_allclose(value(Sigmoid(), x)[0], np.reciprocal(1 + np.exp(-x)), rtol=1e-14)
    np.testing.assert_allclose(value(Tanh(), x)[0], np.tanh(x))
    np.testing.assert_allclose(value(GELU(), x)[0], x * normal, rtol=1e-13, atol=1e-14)
    np.testing.assert_allclose(value(GELU(approximate=True), x)[0], x * normal, atol=5e-4)
    assert np.isfinite(value(Sigmoid(), np.array([[-1e4, 1e4]]))[0]).all()


@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 3e-16), (np.float32, 4e-7)])
def test_the_error_function(dtype: type[np.floating], tolerance: float) -> None:
    x = np.concatenate([np.linspace(-7, 7, 4001), [0.0, -0.0, 1e-300, np.inf, -np.inf]]).astype(dtype)
    wanted = np.array([math.erf(each) for each in x.astype(np.float64)])
    found = erf(np, x)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=1e-38)
    assert np.isnan(erf(np, np.array([np.nan], dtype))).all()


@twenty
@given(seeds, st.integers(2, 4), st.lists(small, max_size=2).map(tuple), small, st.floats(0, 1))
def test_running_statistics_move_to_those_of_the_batch(
    rng: Generator, batch: int, shape: tuple[int, ...], channels: int, momentum: float
) -> None:
    x = 3 + 2 * rng.standard_normal((batch, *shape, channels))
    layer = BatchNorm(momentum)
    params, state = prepared(layer, rng, x.shape[1:])
    y, after, _ = layer.apply(params, state, x, TrainingContext(0))
    rows = x.reshape(-1, channels)
    mean, var = rows.mean(axis=0), rows.var(axis=0)
    normal = (x - mean) / np.sqrt(var + layer.epsilon)
    np.testing.assert_allclose(y, normal * params["scale"] + params["bias"], rtol=1e-9, atol=1e-9)
    unbiased = rows.var(axis=0, ddof=1)
    np.testing.assert_allclose(after["mean"], (1 - momentum) * state["mean"] + momentum * mean, atol=1e-12)
    np.testing.assert_allclose(after["var"], (1 - momentum) * state["var"] + momentum * unbiased, atol=1e-12)
    y, kept, _ = layer.apply(params, after, x, False)
    normal = (x - after["mean"]) / np.sqrt(after["var"] + layer.epsilon)
    np.testing.assert_allclose(y, normal * params["scale"] + params["bias"], rtol=1e-9, atol=1e-9)
    assert kept == after


def test_running_statistics_stay_in_float32_when_the_batch_is_of_halves() -> None:
    x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float16)
    layer = BatchNorm()
    params, state = layer.init(np.random.default_rng(0), (3,))
    y, after, _ = layer.apply(params, state, x, TrainingContext(0))
    assert y.dtype == np.float16
    np.testing.assert_allclose(after["mean"], 0.1 * x.astype(np.float32).mean(axis=0), rtol=1e-5)
    assert {array.dtype for array in after.values()} == {np.dtype(np.float32)}


def test_layer_norm() -> None:
    x = 3 + 2 * np.random.default_rng(0).standard_normal((2, 3, 5))
    y, params, _ = value(LayerNorm(), x)
    normal = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(y, normal * params["scale"] + params["bias"])


class TestDropout:
    x = np.ones((50, 40))

    def drop(self, layer: Layer, train: Train) -> np.ndarray:
        return np.asanyarray(layer.apply({}, {}, self.x, train)[0])

    def test_keeps_the_mean(self) -> None:
        y = self.drop(Dropout(0.25), TrainingContext(1))
        assert set(np.unique(y)) == {0.0, 1 / 0.75}
        assert abs(y.mean() - 1) < 0.05

    def test_is_the_identity_in_evaluation_and_at_rate_0(self) -> None:
        assert self.drop(Dropout(0.5), False) is self.x
        assert self.drop(Dropout(0.0), TrainingContext(1)) is self.x

    def test_draws_the_same_for_the_same_seed_and_path(self) -> None:
        net = Sequential({"a": Dropout(), "b": Sequential({"a": Dropout()})})
        np.testing.assert_array_equal(self.drop(net, TrainingContext(5)), self.drop(net, TrainingContext(5)))
        assert (self.drop(net, TrainingContext(5)) != self.drop(net, TrainingContext(6))).any()

    def test_draws_differently_for_each_layer(self) -> None:
        train = TrainingContext(5)
        drawn = [self.drop(Dropout(), train.under(name)) for name in ("a", "b")]
        drawn += [self.drop(Dropout(), train.under("a").under("a")), self.drop(Dropout(), train)]
        assert len({each.tobytes() for each in drawn}) == 4

    def test_draws_by_its_path_whatever_container_leads_there(self) -> None:
        nested = Residual(Sequential({"drop": Dropout()}))
        alone = self.drop(Dropout(), TrainingContext(9).under("body").under("drop"))
        np.testing.assert_array_equal(self.drop(nested, TrainingContext(9)), alone + self.x)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize(
    "layer",
    [
        Conv2D(4),
        Conv2D(4, window=1, strides=2),
        Conv2D(6, groups=2),
        DepthwiseConv2D(2, strides=2),
        BatchNorm(),
        LayerNorm(),
        Dropout(),
        MaxPool(2, padding="same"),
        AvgPool(2, padding="same"),
        GlobalAvgPool(),
        Flatten(),
        Dense(3),
        ReLU(),
        ReLU6(),
        GELU(),
        GELU(approximate=True),
        Sigmoid(),
        Tanh(),
    ],
    ids=repr,
)
def test_a_layer_computes_in_the_dtype_of_its_input_and_gives_gradients_in_that_of_its_parameters(
    layer: Layer, dtype: type[np.generic]
) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, 5, 4)).astype(dtype)
    params, state = layer.init(rng, x.shape[1:])
    before = x.copy()
    y, _, pullback = layer.apply(params, state, x, TrainingContext(0))
    dparams, dx = pullback(y)
    assert y.dtype == dx.dtype == dtype
    assert {name: array.dtype for name, array in dparams.items()} == dict.fromkeys(params, np.dtype(np.float32))
    np.testing.assert_array_equal(x, before)
    wide = layer.apply(params, state, x.astype(np.float32), TrainingContext(0))
    others = (wide[0], *wide[2](y.astype(np.float32)))
    tolerance = 4 * {np.float32: 2.0**-23, np.float16: 2.0**-10, ml_dtypes.bfloat16: 2.0**-7}[dtype]
    for got, wanted in [(y, others[0]), (dx, others[2]), *((dparams[name], others[1][name]) for name in dparams)]:
        scale = max(np.abs(wanted).max(), 1)
        np.testing.assert_allclose(got.astype(np.float32), wanted, rtol=tolerance, atol=tolerance * scale)
