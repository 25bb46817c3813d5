"""Losses and their gradients, and mixed precision."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.random import Generator

from shoal import errors
from shoal_nn import (
    BatchNorm,
    Conv2D,
    Dense,
    GlobalAvgPool,
    LossScale,
    Policy,
    ReLU,
    Sequential,
    TrainingContext,
    mean_squared_error,
    sigmoid_cross_entropy,
    softmax_cross_entropy,
)
from shoal_nn.precision import Compute
from support.devices.gradient_check import seeds, twenty

shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)
STEP = 1e-5


def check_gradient(loss: Callable[[Any, Any], tuple[Any, Any]], logits: np.ndarray, labels: np.ndarray) -> float:
    """Compares the gradient with central differences, at every element; returns the loss."""
    value, gradient = loss(logits, labels)
    assert np.ndim(value) == 0
    assert gradient.shape == logits.shape
    for index in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[index] = STEP
        measured = (loss(logits + step, labels)[0] - loss(logits - step, labels)[0]) / (2 * STEP)
        assert abs(measured - gradient[index]) < 1e-6 * max(np.abs(gradient).max(), 1e-3)
    return float(value)


@twenty
@given(seeds, shapes, st.booleans())
def test_softmax_cross_entropy(rng: Generator, shape: tuple[int, ...], sparse: bool) -> None:
    logits = 3 * rng.standard_normal((*shape, 3))
    classes = rng.integers(0, 3, shape)
    labels = classes if sparse else rng.random((*shape, 3))
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    wanted = -((np.eye(3)[classes] if sparse else labels) * log_p).sum(axis=-1).mean()
    assert check_gradient(softmax_cross_entropy, logits, labels) == pytest.approx(wanted, rel=1e-12)


@twenty
@given(seeds, shapes)
def test_sigmoid_cross_entropy(rng: Generator, shape: tuple[int, ...]) -> None:
    logits, labels = 3 * rng.standard_normal(shape), rng.random(shape)
    p = 1 / (1 + np.exp(-logits))
    wanted = -(labels * np.log(p) + (1 - labels) * np.log(1 - p)).mean()
    assert check_gradient(sigmoid_cross_entropy, logits, labels) == pytest.approx(wanted, rel=1e-12)


@twenty
@given(seeds, shapes)
def test_mean_squared_error(rng: Generator, shape: tuple[int, ...]) -> None:
    outputs, targets = rng.standard_normal((2, *shape))
    assert check_gradient(mean_squared_error, outputs, targets) == pytest.approx(((outputs - targets) ** 2).mean())


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
def test_large_logits_overflow_nowhere(dtype: type[np.generic]) -> None:
    logits = np.array([[3e4, -3e4, 0], [-3e4, 3e4, 3e4]], dtype)
    loss, gradient = softmax_cross_entropy(logits, np.array([1, 2]))
    assert float(loss) == pytest.approx((6e4 + math.log(2)) / 2, rel=0.01)
    np.testing.assert_allclose(gradient.astype(float), [[0.5, -0.5, 0], [0, 0.25, -0.25]], atol=1e-3)
    loss, gradient = sigmoid_cross_entropy(logits, np.zeros(logits.shape, dtype))
    assert float(loss) == pytest.approx(9e4 / 6, rel=0.01)
    assert np.isfinite(gradient.astype(float)).all()
    assert gradient.dtype == dtype


@pytest.mark.parametrize(
    ("loss", "labels"),
    [
        (softmax_cross_entropy, np.zeros(5, np.int64)),
        (softmax_cross_entropy, np.zeros(4)),
        (softmax_cross_entropy, np.zeros((4, 2))),
        (sigmoid_cross_entropy, np.zeros(4)),
        (mean_squared_error, np.zeros((3, 4))),
    ],
)
def test_labels_of_a_wrong_shape_are_refused(loss: Callable[[Any, Any], tuple[Any, Any]], labels: np.ndarray) -> None:
    says = rf"^{loss.__name__} got labels of shape \({labels.shape[0]},.* and {labels.dtype}, but needs"
    with pytest.raises(errors.InvalidShape, match=says):
        loss(np.zeros((4, 3)), labels)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_of_no_class_is_refused(label: int) -> None:
    with pytest.raises(errors.InvalidData, match=f"the label {label} for logits of 3 classes, 0 to 2"):
        softmax_cross_entropy(np.zeros((2, 3)), np.array([0, label]))


def test_labels_may_be_a_list() -> None:
    expected, _ = softmax_cross_entropy(np.eye(3), np.arange(3))
    assert softmax_cross_entropy(np.eye(3), [0, 1, 2])[0] == expected


@pytest.mark.parametrize("loss", [softmax_cross_entropy, sigmoid_cross_entropy, mean_squared_error])
@pytest.mark.parametrize("dtype", ["uint8", "int16"])
def test_outputs_that_are_not_floats_are_refused(loss: Callable[[Any, Any], tuple[Any, Any]], dtype: str) -> None:
    with pytest.raises(errors.InvalidShape, match=rf"^{loss.__name__} got outputs of {dtype}, .*augment\.ToFloat"):
        loss(np.zeros((4, 3), dtype), np.zeros((4, 3)))


class TestLossScale:
    def test_halves_and_resets_its_count_when_gradients_overflow(self) -> None:
        scale = LossScale(1024, interval=2, good_steps=1)
        assert scale.after(False) == LossScale(512, interval=2)
        assert LossScale(1).after(False) == LossScale(1)

    def test_doubles_after_as_many_good_steps(self) -> None:
        scale = LossScale(1024, interval=2)
        assert scale.after(True) == LossScale(1024, interval=2, good_steps=1)
        assert scale.after(True).after(True) == LossScale(2048, interval=2)
        assert LossScale(2.0**24, interval=1).after(True) == LossScale(2.0**24, interval=1)

    def test_unscaling_reverses_scaling(self) -> None:
        scale = LossScale(8)
        gradients, finite = scale.unscaled({"a": scale.scaled(np.array([1.0, 2.0])), "b": np.zeros(1)})
        np.testing.assert_array_equal(gradients["a"], [1, 2])
        assert finite
        assert scale.unscaled({}) == ({}, True)

    @pytest.mark.parametrize("wrong", [np.inf, -np.inf, np.nan])
    def test_one_gradient_that_is_not_finite_is_enough(self, wrong: float) -> None:
        assert not LossScale().unscaled({"a": np.ones(3), "b": np.array([0, wrong])})[1]

    @pytest.mark.parametrize("settings_of", [{"scale": 0.5}, {"scale": 2.0**25}, {"interval": 0}, {"good_steps": -1}])
    def test_settings_are_checked(self, settings_of: Mapping[str, Any]) -> None:
        with pytest.raises(errors.InvalidLayer, match="loss scale"):
            LossScale(**settings_of)


class TestMixedPrecision:
    NET = Sequential(
        {"conv": Conv2D(8), "norm": BatchNorm(), "relu": ReLU(), "pool": GlobalAvgPool(), "head": Dense(2)}
    )

    def check_training(self, compute: Compute, scale: LossScale, steps: int = 60) -> tuple[list[float], list[float]]:
        """Two kinds of images, stripes down and across; the losses, and the scales on the way."""
        rng = np.random.default_rng(0)
        labels = np.arange(32) % 2
        stripes = np.tile([1.0, -1.0], 4)[None, :, None] * np.ones((8, 8, 1))
        x = np.where(labels[:, None, None, None], stripes.transpose(1, 0, 2), stripes)
        x = (x + 0.3 * rng.standard_normal(x.shape)).astype(np.float32)
        policy = Policy(compute)
        params, state = self.NET.init(rng, x.shape[1:])
        losses, scales = [], []
        for step in range(steps):
            logits, after, pullback = self.NET.apply(params, state, policy.inputs(x), TrainingContext(step))
            assert logits.dtype == policy.inputs(x).dtype
            loss, dlogits = softmax_cross_entropy(policy.outputs(logits), labels)
            with np.errstate(over="ignore", invalid="ignore"):
                gradients, finite = scale.unscaled(pullback(policy.gradient(scale.scaled(dlogits)))[0])
            scales.append(scale.scale)
            scale = scale.after(finite)
            if finite:
                params = {name: value - 0.3 * gradients[name] for name, value in params.items()}
                state = after
            losses.append(float(loss))
        assert {value.dtype for value in (params | state).values()} == {np.dtype(np.float32)}
        return losses, scales

    @pytest.mark.parametrize("compute", ["float16", "bfloat16"])
    def test_ends_where_float32_ends(self, compute: Compute) -> None:
        wanted, _ = self.check_training("float32", LossScale(1.0))
        losses, _ = self.check_training(compute, LossScale(256.0) if compute == "float16" else LossScale(1.0))
        assert wanted[-1] < 0.1
        np.testing.assert_allclose(losses, wanted, atol=0.02)

    def test_a_scale_that_is_too_large_costs_a_few_steps(self) -> None:
        losses, scales = self.check_training("float16", LossScale(2.0**24, interval=20))
        assert scales[1] == 2.0**23
        assert min(scales) < 2.0**22
        assert losses[1] == losses[0]
        assert losses[-1] < 0.3

    def test_whole_numbers_are_not_cast(self) -> None:
        ids = np.arange(3)
        assert Policy("float16").inputs(ids) is ids

    def test_an_unknown_precision_lists_the_known_ones(self) -> None:
        with pytest.raises(errors.InvalidLayer, match="float32, float16, bfloat16, not 'int8'"):
            Policy("int8")  # type: ignore[arg-type]  # it is to be refused
