"""Losses of samples: their pullbacks compared with central differences, and their means with the losses of a batch."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shoal import errors
from shoal_nn import losses

RNG = np.random.default_rng(0)
OUTPUTS = RNG.uniform(0.05, 0.95, (3, 2, 4))
TARGETS = RNG.uniform(0.1, 0.9, OUTPUTS.shape)
CLASSES = RNG.integers(0, 4, OUTPUTS.shape[:-1])
LOSSES: dict[str, tuple[Callable[..., Any], np.ndarray]] = {
    "squared": (losses.squared_errors, TARGETS),
    "absolute": (losses.absolute_errors, TARGETS),
    "percentage": (losses.absolute_percentage_errors, TARGETS),
    "logarithmic": (losses.squared_logarithmic_errors, TARGETS),
    "huber": (functools.partial(losses.huber_losses, delta=0.3), TARGETS),
    "log cosh": (losses.log_cosh_losses, TARGETS),
    "hinge": (losses.hinge_losses, np.sign(TARGETS - 0.5)),
    "poisson": (losses.poisson_losses, TARGETS),
    "divergence": (losses.divergences, TARGETS),
    "binary": (functools.partial(losses.binary_cross_entropies, smoothing=0.1), TARGETS),
    "binary logits": (functools.partial(losses.binary_cross_entropies, from_logits=True), TARGETS),
    "probabilities": (functools.partial(losses.categorical_cross_entropies, smoothing=0.1), TARGETS),
    "classes": (losses.categorical_cross_entropies, CLASSES),
    "class logits": (functools.partial(losses.categorical_cross_entropies, from_logits=True), CLASSES),
}


@pytest.mark.parametrize("name", LOSSES)
def test_pullbacks(name: str) -> None:
    loss, targets = LOSSES[name]
    values, pull = loss(OUTPUTS, targets)
    weights = np.random.default_rng(1).standard_normal(values.shape)
    assert values.shape == OUTPUTS.shape[:-1]
    direction = np.random.default_rng(2).standard_normal(OUTPUTS.shape)
    ahead, behind = (float((loss(OUTPUTS + step * direction, targets)[0] * weights).sum()) for step in (1e-6, -1e-6))
    assert (pull(weights) * direction).sum() == pytest.approx((ahead - behind) / 2e-6, rel=1e-5)


def test_means_equal_the_losses_of_a_batch() -> None:
    logits = 3 * OUTPUTS
    for targets in (CLASSES, TARGETS):
        values, _ = losses.categorical_cross_entropies(logits, targets, from_logits=True)
        assert values.mean() == pytest.approx(float(losses.softmax_cross_entropy(logits, targets)[0]))
    values, _ = losses.binary_cross_entropies(logits, TARGETS, from_logits=True)
    assert values.mean() == pytest.approx(float(losses.sigmoid_cross_entropy(logits, TARGETS)[0]))
    values, _ = losses.squared_errors(logits, TARGETS)
    assert values.mean() == pytest.approx(float(losses.mean_squared_error(logits, TARGETS)[0]))


def test_targets_that_do_not_fit() -> None:
    with pytest.raises(errors.InvalidShape, match=r"squared_errors got labels of shape \(2,\) and float64"):
        losses.squared_errors(OUTPUTS, np.zeros(2))
    with pytest.raises(errors.InvalidShape, match="or \\(3, 2\\) of integers"):
        losses.categorical_cross_entropies(OUTPUTS, np.zeros((3, 2)))
    with pytest.raises(errors.InvalidData, match="got the label 4 for outputs of 4 classes, 0 to 3"):
        losses.categorical_cross_entropies(OUTPUTS, CLASSES + 4 - CLASSES.max())
