"""Layers compared with PyTorch's: values, gradients, running statistics, over random shapes, in float32 and float64."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal_nn
from shoal_nn import Layer, TrainingContext

torch = pytest.importorskip("torch", reason="PyTorch is not installed: `make reference` does that")
nn = torch.nn

Dtype = type[np.floating[Any]]
# The name of a parameter, their tensor, and what makes their gradient ours.
Weight = tuple[str, Any, Callable[[np.ndarray], np.ndarray]]
FEW = settings(max_examples=25, deadline=None)
# All axes but the last: the batch, and another perhaps. Four axes would be images.
LEADING = st.lists(st.integers(1, 4), min_size=1, max_size=2).map(tuple)
DTYPES = st.sampled_from([np.float32, np.float64])
# Of what is compared, in units of its largest element.
TOLERANCE: dict[Dtype, float] = {np.float32: 2e-5, np.float64: 1e-12}
# What is smaller than inputs by so much may be 0 but for rounding.
FLOOR = 0.1


def drawn(seed: int, shape: int | tuple[int, ...], dtype: Dtype) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def to_torch(x: np.ndarray, *, grad: bool = False) -> Any:
    """An array as a tensor; images as PyTorch has them, channels before height and width."""
    x = np.moveaxis(x, -1, 1) if x.ndim == 4 else x
    return torch.from_numpy(np.ascontiguousarray(x)).requires_grad_(grad)


def from_torch(t: Any) -> np.ndarray:
    array = t.detach().numpy()
    return np.moveaxis(array, 1, -1) if array.ndim == 4 else array


def check_close(found: np.ndarray, expected: npt.ArrayLike, dtype: Dtype, what: str) -> None:
    expected = np.asarray(expected)
    assert found.dtype == dtype, what
    assert found.shape == expected.shape, what
    scale = np.abs(expected).max(initial=0.0) + FLOOR
    assert np.abs(found - expected).max(initial=0.0) <= TOLERANCE[dtype] * scale, what


def check_same_step(
    layer: Layer,
    theirs: Callable[..., Any],
    x: np.ndarray,
    dtype: Dtype,
    *,
    params: dict[str, np.ndarray] | None = None,
    state: dict[str, np.ndarray] | None = None,
    weights: Sequence[Weight] = (),
    train: TrainingContext | Literal[False] = False,
) -> Mapping[str, np.ndarray]:
    """Value, dx and the gradients of both; `weights` are of ours and theirs, with what makes theirs ours."""
    params, state = params or {}, state or {}
    y, moved, pullback = layer.apply(params, state, x, train)
    given_x = to_torch(x, grad=True)
    expected = theirs(given_x)
    check_close(y, from_torch(expected), dtype, "value")
    dy = drawn(99, y.shape, dtype)
    by_params, dx = pullback(dy)
    expected.backward(to_torch(dy))
    check_close(dx, from_torch(given_x.grad), dtype, "dx")
    for name, tensor, ours in weights:
        check_close(by_params[name], ours(tensor.grad.numpy()), dtype, name)
    return moved


@FEW
@given(st.data(), DTYPES)
def test_convolutions(data: st.DataObject, dtype: Dtype) -> None:
    groups = data.draw(st.sampled_from([1, 1, 2, 3]))
    channels, filters = groups * data.draw(st.integers(1, 3)), groups * data.draw(st.integers(1, 3))
    window = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    strides = data.draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = data.draw(st.tuples(st.integers(0, 2), st.integers(0, 2)))
    height, width = (data.draw(st.integers(size, size + 6)) for size in window)
    x = drawn(1, (data.draw(st.integers(1, 3)), height, width, channels), dtype)
    layer = shoal_nn.Conv2D(filters, window=window, strides=strides, padding=padding, groups=groups)
    theirs = nn.Conv2d(channels, filters, window, strides, padding, groups=groups).to(torch.from_numpy(x).dtype)
    params = {
        "kernel": np.ascontiguousarray(theirs.weight.detach().numpy().transpose(2, 3, 1, 0)),
        "bias": theirs.bias.detach().numpy().copy(),
    }
    weights = [
        ("kernel", theirs.weight, lambda gradient: gradient.transpose(2, 3, 1, 0)),
        ("bias", theirs.bias, lambda gradient: gradient),
    ]
    check_same_step(layer, theirs, x, dtype, params=params, weights=weights)


@FEW
@given(st.data(), DTYPES)
def test_depthwise_convolutions(data: st.DataObject, dtype: Dtype) -> None:
    channels, multiplier = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))
    window, strides = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 2))
    x = drawn(1, (2, window + 3, window + 4, channels), dtype)
    layer = shoal_nn.DepthwiseConv2D(multiplier, window=window, strides=strides, padding=window // 2)
    theirs = nn.Conv2d(channels, channels * multiplier, window, strides, window // 2, groups=channels)
    theirs = theirs.to(torch.from_numpy(x).dtype)
    params = {
        "kernel": np.ascontiguousarray(theirs.weight.detach().numpy().transpose(2, 3, 1, 0)),
        "bias": theirs.bias.detach().numpy().copy(),
    }
    weights = [
        ("kernel", theirs.weight, lambda gradient: gradient.transpose(2, 3, 1, 0)),
        ("bias", theirs.bias, lambda gradient: gradient),
    ]
    check_same_step(layer, theirs, x, dtype, params=params, weights=weights)


@FEW
@given(LEADING, st.integers(1, 6), st.integers(1, 6), DTYPES)
def test_dense(leading: tuple[int, ...], features: int, units: int, dtype: Dtype) -> None:
    x = drawn(1, (*leading, features), dtype)
    theirs = nn.Linear(features, units).to(torch.from_numpy(x).dtype)
    params = {"kernel": theirs.weight.detach().numpy().T.copy(), "bias": theirs.bias.detach().numpy().copy()}
    weights = [
        ("kernel", theirs.weight, lambda gradient: gradient.T),
        ("bias", theirs.bias, lambda gradient: gradient),
    ]
    check_same_step(shoal_nn.Dense(units), theirs, x, dtype, params=params, weights=weights)


@FEW
@given(
    st.integers(2, 5), st.integers(1, 4), st.integers(1, 4), DTYPES, st.booleans(), st.booleans(), st.floats(0.05, 0.5)
)
def test_batch_norm(
    batch: int, size: int, channels: int, dtype: Dtype, rows: bool, training: bool, momentum: float
) -> None:
    shape = (6 * batch, channels) if rows else (batch, size, size + 1, channels)
    x = drawn(1, shape, dtype) * 3 + 1
    theirs = (nn.BatchNorm1d if rows else nn.BatchNorm2d)(channels, momentum=momentum).to(torch.from_numpy(x).dtype)
    with torch.no_grad():
        for seed, tensor in enumerate((theirs.weight, theirs.bias, theirs.running_mean)):
            tensor.copy_(torch.from_numpy(drawn(seed, channels, dtype)))
        theirs.running_var.copy_(torch.from_numpy(1 + drawn(5, channels, dtype) ** 2))
    theirs.train(training)
    params = {"scale": theirs.weight.detach().numpy().copy(), "bias": theirs.bias.detach().numpy().copy()}
    state = {"mean": theirs.running_mean.numpy().copy(), "var": theirs.running_var.numpy().copy()}
    weights = [("scale", theirs.weight, lambda gradient: gradient), ("bias", theirs.bias, lambda gradient: gradient)]
    moved = check_same_step(
        shoal_nn.BatchNorm(momentum=momentum),
        theirs,
        x,
        dtype,
        params=params,
        state=state,
        weights=weights,
        train=shoal_nn.TrainingContext(1) if training else False,
    )
    check_close(moved["mean"], theirs.running_mean.numpy(), dtype, "running mean")
    check_close(moved["var"], theirs.running_var.numpy(), dtype, "running variance")


@FEW
@given(LEADING, st.integers(4, 8), DTYPES)
def test_layer_norm(leading: tuple[int, ...], features: int, dtype: Dtype) -> None:
    x = drawn(1, (*leading, features), dtype)
    theirs = nn.LayerNorm(features, eps=shoal_nn.LayerNorm().epsilon).to(torch.from_numpy(x).dtype)
    params = {"scale": theirs.weight.detach().numpy().copy(), "bias": theirs.bias.detach().numpy().copy()}
    weights = [("scale", theirs.weight, lambda gradient: gradient), ("bias", theirs.bias, lambda gradient: gradient)]
    check_same_step(shoal_nn.LayerNorm(), theirs, x, dtype, params=params, weights=weights)


@FEW
@given(st.data(), DTYPES)
def test_pooling(data: st.DataObject, dtype: Dtype) -> None:
    window, strides = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    padding = data.draw(st.integers(0, window // 2))
    x = drawn(1, (2, window + data.draw(st.integers(0, 5)), window + 2, 3), dtype)
    options: dict[str, Any] = {"window": window, "strides": strides, "padding": padding}
    check_same_step(shoal_nn.MaxPool(**options), nn.MaxPool2d(window, strides, padding), x, dtype)
    average = nn.AvgPool2d(window, strides, padding, count_include_pad=False)
    check_same_step(shoal_nn.AvgPool(**options), average, x, dtype)
    counting = nn.AvgPool2d(window, strides, padding, count_include_pad=True)
    check_same_step(shoal_nn.AvgPool(**options, count_padding=True), counting, x, dtype)
    check_same_step(shoal_nn.GlobalAvgPool(), lambda given: given.mean(dim=(2, 3)), x, dtype)


@FEW
@given(LEADING, st.integers(1, 6), st.integers(1, 4), DTYPES)
def test_embedding(leading: tuple[int, ...], rows: int, width: int, dtype: Dtype) -> None:
    numbers, table = np.random.default_rng(1).integers(0, rows, leading), drawn(2, (rows, width), dtype)
    theirs = torch.from_numpy(table.copy()).requires_grad_()
    expected = nn.functional.embedding(torch.from_numpy(numbers), theirs)
    y, _, pullback = shoal_nn.Embedding(rows, width).apply({"table": table}, {}, numbers, False)
    check_close(y, expected.detach().numpy(), dtype, "value")
    dy = drawn(99, y.shape, dtype)
    expected.backward(torch.from_numpy(dy))
    check_close(pullback(dy)[0]["table"], theirs.grad.numpy(), dtype, "table")


ACTIVATIONS = [
    (shoal_nn.ReLU(), nn.ReLU()),
    (shoal_nn.ReLU6(), nn.ReLU6()),
    (shoal_nn.Sigmoid(), nn.Sigmoid()),
    (shoal_nn.Tanh(), nn.Tanh()),
    (shoal_nn.GELU(), nn.GELU()),
    (shoal_nn.GELU(approximate=True), nn.GELU(approximate="tanh")),
]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("ours", "theirs"), ACTIVATIONS, ids=str)
def test_activations(ours: Layer, theirs: Callable[..., Any], dtype: Dtype) -> None:
    check_same_step(ours, theirs, drawn(1, (40, 7), dtype) * 4, dtype)


LABELS = np.array([[0, 1, 4], [2, 2, 3]])
CHANCES = np.random.default_rng(5).dirichlet(np.ones(5), (2, 3))
CLASSES = nn.functional.cross_entropy
LOSSES: dict[str, tuple[Callable[[np.ndarray], Any], Callable[[Any], Any]]] = {
    "classes": (
        lambda logits: shoal_nn.softmax_cross_entropy(logits, LABELS),
        lambda logits: CLASSES(logits.reshape(-1, 5), torch.from_numpy(LABELS).reshape(-1)),
    ),
    "probabilities": (
        lambda logits: shoal_nn.softmax_cross_entropy(logits, CHANCES),
        lambda logits: CLASSES(logits.reshape(-1, 5), torch.from_numpy(CHANCES).reshape(-1, 5).to(logits.dtype)),
    ),
    "sigmoid": (
        lambda logits: shoal_nn.sigmoid_cross_entropy(logits, CHANCES),
        lambda logits: nn.functional.binary_cross_entropy_with_logits(
            logits, torch.from_numpy(CHANCES).to(logits.dtype)
        ),
    ),
    "squares": (
        lambda logits: shoal_nn.mean_squared_error(logits, CHANCES),
        lambda logits: nn.functional.mse_loss(logits, torch.from_numpy(CHANCES).to(logits.dtype)),
    ),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str, dtype: Dtype) -> None:
    ours, theirs = LOSSES[name]
    logits = drawn(1, (2, 3, 5), dtype) * 4
    tensor = torch.from_numpy(logits.copy()).requires_grad_()
    expected = theirs(tensor)
    expected.backward()
    loss, by_logits = ours(logits)
    check_close(np.asarray(loss), expected.item(), dtype, "loss")
    check_close(by_logits, tensor.grad.numpy(), dtype, "gradient")
