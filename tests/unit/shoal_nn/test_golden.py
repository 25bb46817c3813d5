"""Layers, losses and a step of ResNet-18 compared with PyTorch's results from `tests/golden/make_layers.py`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal_nn import TrainingContext, mean_squared_error, sigmoid_cross_entropy, softmax_cross_entropy
from support.devices.golden_layers import (
    CASES,
    LOGITS,
    RESNET,
    RESNET_IMAGES,
    RESNET_LABELS,
    digest,
    drawn,
    fed,
    values,
)

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "layers.json").read_text())
LOSSES = {
    "classes": lambda logits, labels: softmax_cross_entropy(logits, labels.argmax(axis=-1)),
    "probabilities": softmax_cross_entropy,
    "sigmoid": sigmoid_cross_entropy,
    "squares": mean_squared_error,
}


def check_close(found: np.ndarray, golden: Any, what: str, tolerance: float = 1e-12) -> None:
    """Asserts that no element is further off than this share of the largest; `golden` is an array as lists."""
    expected = np.asarray(golden)
    assert found.shape == expected.shape, what
    assert np.abs(found - expected).max() <= tolerance * np.abs(expected).max(), what


@pytest.mark.parametrize("name", GOLDEN["layers"])
def test_layers(name: str) -> None:
    case, want = CASES[name], GOLDEN["layers"][name]
    params, state = values(case.layer, case.shape[1:])
    y, after, pullback = case.layer.apply(params, state, fed(name), case.train)
    check_close(y, want["value"], "value")
    gradients, dx = pullback(drawn(f"{name} dy", y.shape))
    assert gradients.keys() == want["gradients"].keys()
    for key, gradient in gradients.items():
        check_close(gradient, want["gradients"][key], key)
    assert after.keys() == want["state"].keys()
    for key, moved in after.items():
        check_close(moved, want["state"][key], key)
    if want["dx"] is None:
        assert dx is None
    else:
        check_close(dx, want["dx"], "dx")


@pytest.mark.parametrize("name", GOLDEN["losses"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float64, 1e-14), (np.float32, 1e-6)])
def test_losses(name: str, dtype: type[np.floating], tolerance: float) -> None:
    logits, want = drawn("logits", LOGITS).astype(dtype), GOLDEN["losses"][name]
    loss, gradient = LOSSES[name](logits, abs(drawn("labels", LOGITS)))
    assert loss.dtype == gradient.dtype == dtype
    check_close(loss, want["loss"], "loss", tolerance)
    check_close(gradient, want["gradient"], "gradient", tolerance)


def test_a_step_of_resnet18() -> None:
    want = GOLDEN["resnet18"]
    params, state = values(RESNET, RESNET_IMAGES[1:])
    logits, after, pullback = RESNET.apply(params, state, drawn("images", RESNET_IMAGES), TrainingContext(0))
    loss, by_logits = softmax_cross_entropy(logits, RESNET_LABELS)
    gradients, _ = pullback(by_logits)
    check_close(logits, want["logits"], "logits", 1e-11)
    check_close(loss, want["loss"], "loss", 1e-11)
    for found, expected in ((gradients, want["gradients"]), (after, want["state"])):
        assert found.keys() == expected.keys()
        for name, array in found.items():
            norm, product = digest(name, array)
            assert norm == pytest.approx(expected[name][0], rel=1e-9), name
            assert product == pytest.approx(expected[name][1], abs=1e-9 * norm * array.size**0.5), name


def test_golden_cases_are_all_there() -> None:
    assert GOLDEN["layers"].keys() == CASES.keys()
    assert GOLDEN["losses"].keys() == LOSSES.keys()
