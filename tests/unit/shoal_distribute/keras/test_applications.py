"""Models of `applications` with published weights return what the originals return."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal_distribute.keras.applications import MobileNetV2
from support.devices.golden_layers import drawn
from support.published_weights import CLASSES, IMAGES, WIDTH, published_value

GOLDEN = json.loads((Path(__file__).parents[3] / "golden" / "weights.json").read_text())


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    shapes = GOLDEN["names"]["keras"]["narrow"]
    path = tmp_path_factory.mktemp("weights") / "mobilenet.npz"
    arrays: Any = {name: published_value("keras", name, tuple(shape)) for name, shape in shapes.items()}
    np.savez(path, **arrays)
    return path


def test_mobilenet_with_published_weights_returns_what_keras_returns(weights: Path) -> None:
    images, expected = drawn("published images", IMAGES).astype(np.float32), np.array(GOLDEN["outputs"]["keras"])
    model = MobileNetV2(IMAGES[1:], alpha=WIDTH, classes=CLASSES, weights=weights, classifier_activation=None)
    logits = np.asarray(model.predict(images, verbose=0))
    assert np.abs(logits - expected).max() < 2e-5 * np.abs(expected).max()
    features = MobileNetV2(IMAGES[1:], alpha=WIDTH, include_top=False, pooling="avg", weights=weights)
    assert np.asarray(features.predict(images, verbose=0)).shape == (2, 1280)
