"""Every layer's pullback compared with central differences in float64, in random configurations."""

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.random import Generator

from shoal_nn import (
    ELU,
    GELU,
    SELU,
    Add,
    AvgPool,
    BatchNorm,
    ByFeature,
    Column,
    Concat,
    Conv2D,
    Dense,
    DepthwiseConv2D,
    Dropout,
    Embedding,
    FeatureCross,
    Flatten,
    Frozen,
    GlobalAvgPool,
    GlobalMaxPool,
    Identity,
    Interpolate,
    Layer,
    LayerNorm,
    LeakyReLU,
    MaxPool,
    Parallel,
    ReLU,
    ReLU6,
    Rescale,
    Reshape,
    Residual,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
    TrainingContext,
    ZeroPad,
)
from shoal_nn._ops import Padding, Pair
from shoal_nn.activations import Activation
from shoal_nn.containers import Merge
from shoal_nn.layer import StatelessLayer, Train
from shoal_nn.models import wide_deep
from support.devices.gradient_check import apart, check_gradients, seeds, twenty
from support.run_lengths import draws

WORDS: list[Literal["same", "valid"]] = ["same", "valid"]

small = st.integers(1, 4)
batches = st.integers(1, 3)
leading = st.lists(st.integers(1, 3), max_size=2).map(tuple)
sizes = st.tuples(st.integers(1, 6), st.integers(1, 6))
windows = st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3))
strides = st.integers(1, 3) | st.tuples(st.integers(1, 3), st.integers(1, 3))
sides = st.integers(0, 2)
paddings = st.one_of(
    st.sampled_from(WORDS),
    sides,
    st.tuples(sides, sides),
    st.tuples(st.tuples(sides, sides), st.tuples(sides, sides)),
)
modes = st.sampled_from([TrainingContext(7), False])


def larger_than(window: Pair, size: tuple[int, int]) -> tuple[int, int]:
    """A size that a window without padding fits in."""
    height, width = window if isinstance(window, tuple) else (window, window)
    return size[0] + height - 1, size[1] + width - 1


@twenty
@given(seeds, batches, leading, small, small, st.booleans())
def test_dense(rng: Generator, batch: int, shape: tuple[int, ...], inputs: int, units: int, bias: bool) -> None:
    check_gradients(Dense(units, bias=bias), rng.standard_normal((batch, *shape, inputs)), rng)


@twenty
@given(seeds, batches, leading, small, small)
def test_embedding(rng: Generator, batch: int, shape: tuple[int, ...], rows: int, width: int) -> None:
    check_gradients(Embedding(rows, width), rng.integers(0, rows, (batch, *shape)), rng)


@twenty
@given(seeds, batches, sizes, small, small, windows, strides, paddings, st.booleans())
def test_convolution(
    rng: Generator,
    batch: int,
    size: tuple[int, int],
    channels: int,
    filters: int,
    window: Pair,
    stride: Pair,
    padding: Padding,
    bias: bool,
) -> None:
    layer = Conv2D(filters, window=window, strides=stride, padding=padding, bias=bias)
    check_gradients(layer, rng.standard_normal((batch, *larger_than(window, size), channels)), rng)


@twenty
@given(seeds, batches, sizes, st.integers(1, 3), st.integers(1, 2), st.integers(1, 2), windows, strides, paddings)
def test_convolution_in_groups(
    rng: Generator,
    batch: int,
    size: tuple[int, int],
    groups: int,
    channels: int,
    filters: int,
    window: Pair,
    stride: Pair,
    padding: Padding,
) -> None:
    layer = Conv2D(groups * filters, groups=groups, window=window, strides=stride, padding=padding)
    check_gradients(layer, rng.standard_normal((batch, *larger_than(window, size), groups * channels)), rng)


@twenty
@given(seeds, batches, sizes, small, st.integers(1, 2), windows, strides, paddings)
def test_depthwise_convolution(
    rng: Generator,
    batch: int,
    size: tuple[int, int],
    channels: int,
    multiplier: int,
    window: Pair,
    stride: Pair,
    padding: Padding,
) -> None:
    layer = DepthwiseConv2D(multiplier, window=window, strides=stride, padding=padding)
    check_gradients(layer, rng.standard_normal((batch, *larger_than(window, size), channels)), rng)


@twenty
@given(seeds, st.integers(2, 4), leading, small, modes)
def test_batch_norm(rng: Generator, batch: int, shape: tuple[int, ...], channels: int, mode: Train) -> None:
    check_gradients(BatchNorm(epsilon=0.1), rng.standard_normal((batch, *shape, channels)), rng, mode)


@twenty
@given(seeds, batches, leading, st.integers(1, 6))
def test_layer_norm(rng: Generator, batch: int, shape: tuple[int, ...], features: int) -> None:
    check_gradients(LayerNorm(epsilon=0.1), rng.standard_normal((batch, *shape, features)), rng)


@twenty
@given(seeds, batches, leading, small, st.floats(0, 0.9), modes)
def test_dropout(rng: Generator, batch: int, shape: tuple[int, ...], features: int, rate: float, mode: Train) -> None:
    check_gradients(Dropout(rate), rng.standard_normal((batch, *shape, features)), rng, mode)


@pytest.mark.parametrize("pooling", [MaxPool, AvgPool])
@twenty
@given(data=st.data())
def test_pooling_over_windows(pooling: type[MaxPool] | type[AvgPool], data: st.DataObject) -> None:
    rng, batch, size, channels = data.draw(seeds), data.draw(batches), data.draw(sizes), data.draw(small)
    window: Pair = data.draw(windows)
    height, width = window if isinstance(window, tuple) else (window, window)
    rows, columns = st.integers(0, height - 1), st.integers(0, width - 1)
    explicit = st.tuples(rows, columns) | st.tuples(st.tuples(rows, rows), st.tuples(columns, columns))
    padding: Padding = data.draw(st.sampled_from(WORDS) | explicit)
    settings_of = {"count_padding": data.draw(st.booleans())} if pooling is AvgPool else {}
    layer = pooling(window, data.draw(st.none() | strides), padding, **settings_of)
    check_gradients(layer, apart(rng, (batch, *larger_than(window, size), channels)), rng)


@pytest.mark.parametrize("layer", [GlobalAvgPool(), GlobalMaxPool(), Flatten(), Reshape((1, -1)), Softmax()], ids=repr)
@twenty
@given(rng=seeds, batch=batches, shape=leading, channels=small)
def test_layers_of_any_axes(
    layer: StatelessLayer, rng: Generator, batch: int, shape: tuple[int, ...], channels: int
) -> None:
    check_gradients(layer, apart(rng, (batch, *shape, 2, channels)), rng)


RESIZING = [Interpolate((5, 3)), Interpolate((2, 2), "nearest")]


@pytest.mark.parametrize("layer", [ZeroPad(((1, 0), (2, 1))), Rescale((0.5, 2.0), -1.0), *RESIZING], ids=repr)
def test_padding_resizing_and_rescaling(layer: StatelessLayer) -> None:
    rng = np.random.default_rng(0)
    check_gradients(layer, rng.standard_normal((2, 3, 1, 2)), rng)


POINTWISE = [ReLU(), ReLU6(), Sigmoid(), Tanh(), GELU(), GELU(approximate=True)]
MORE_POINTWISE = [LeakyReLU(0.2), ELU(0.5), SELU(), SiLU(), Softplus()]


@pytest.mark.parametrize("layer", [*POINTWISE, *MORE_POINTWISE], ids=repr)
@twenty
@given(rng=seeds, batch=batches, shape=leading, spread=st.sampled_from([1, 5]))
def test_activations(layer: Activation, rng: Generator, batch: int, shape: tuple[int, ...], spread: int) -> None:
    check_gradients(layer, spread * apart(rng, (batch, *shape, 3)), rng)


@settings(max_examples=draws(6))
@given(seeds, batches, st.integers(2, 4), small, st.booleans())
def test_sequential_and_residual(rng: Generator, batch: int, size: int, channels: int, projects: bool) -> None:
    filters = channels + 1 if projects else channels
    body = Sequential([Conv2D(filters, bias=False), BatchNorm(epsilon=0.1), Tanh(), Dropout(0.3), Conv2D(filters)])
    shortcut = Conv2D(filters, window=1, bias=False) if projects else Identity()
    net = Sequential({"block": Residual(body, shortcut), "pool": GlobalAvgPool(), "head": Dense(2)})
    check_gradients(net, rng.standard_normal((batch, size, size, channels)), rng)


@pytest.mark.parametrize("join", [Add(), Concat()], ids=repr)
@twenty
@given(rng=seeds, batch=batches, shape=leading, units=st.lists(small, min_size=1, max_size=3))
def test_parallel(join: Merge, rng: Generator, batch: int, shape: tuple[int, ...], units: list[int]) -> None:
    branches = [Sequential([Dense(units[0] if join == Add() else each), Sigmoid()]) for each in units]
    check_gradients(Parallel(branches, join), rng.standard_normal((batch, *shape, 3)), rng)


@pytest.mark.parametrize(
    "words", [Embedding(5, 3), Sequential([Flatten(), Embedding(5, 3)]), Parallel([Embedding(5, 3), Embedding(5, 3)])]
)
@twenty
@given(rng=seeds, batch=batches, length=small)
def test_an_embedding_comes_first_and_has_no_dx(words: Layer, rng: Generator, batch: int, length: int) -> None:
    net = Sequential({"words": words, "flat": Flatten(), "head": Dense(2)})
    check_gradients(net, rng.integers(0, 5, (batch, length)), rng)


@twenty
@given(seeds, batches, leading)
def test_column(rng: Generator, batch: int, shape: tuple[int, ...]) -> None:
    check_gradients(Column(), rng.standard_normal((batch, *shape)), rng)


@pytest.mark.parametrize("join", [Add(), Concat()], ids=repr)
@twenty
@given(rng=seeds, batch=batches, rows=st.lists(small, min_size=1, max_size=3), width=small)
def test_features_by_name(join: Merge, rng: Generator, batch: int, rows: list[int], width: int) -> None:
    features: dict[str, np.ndarray] = {f"category{i}": rng.integers(0, each, batch) for i, each in enumerate(rows)}
    branches: dict[str, Layer] = {f"category{i}": Embedding(each, width) for i, each in enumerate(rows)}
    features["number"] = rng.standard_normal(batch)
    branches["number"] = Sequential([Column(), Dense(width)])
    net = Sequential({"features": ByFeature(branches, join), "head": Dense(2)})
    check_gradients(net, features, rng)


@twenty
@given(seeds, batches, st.integers(1, 7), small)
def test_crossed_features(rng: Generator, batch: int, rows: int, width: int) -> None:
    features = {name: rng.integers(0, 5, batch) for name in "ab"}
    check_gradients(Sequential([FeatureCross("a", "b", rows), Embedding(rows, width)]), features, rng)


@settings(max_examples=draws(6), derandomize=True)  # ReLU: periodically a step would cross where its slope jumps
@given(seeds, st.integers(1, 5), st.lists(small, max_size=2), small, st.booleans())
def test_wide_and_deep(rng: Generator, batch: int, hidden: list[int], classes: int, crosses: bool) -> None:
    net = wide_deep(
        {"a": 3, "b": 4}, ["n"], [("a", "b")] if crosses else [], classes=classes, hidden=hidden, cross_rows=5
    )
    features = {"a": rng.integers(0, 3, batch), "b": rng.integers(0, 4, batch), "n": rng.standard_normal(batch)}
    check_gradients(net, features, rng)


@twenty
@given(seeds, batches, small, small)
def test_frozen_between_layers_that_learn(rng: Generator, batch: int, inputs: int, units: int) -> None:
    still = Frozen(Sequential([Dense(units), BatchNorm(epsilon=0.1), Tanh(), Dropout(0.5)]), input_gradient=True)
    check_gradients(Sequential([Dense(units), still, Dense(2)]), rng.standard_normal((batch, inputs)), rng)
