"""Layers that change images at random: what they draw, and evaluation. Keras' golden file has their values."""

import numpy as np
import pytest

from shoal import errors
from shoal_nn import augmentation
from shoal_nn.layer import Layer, TrainingContext

IMAGES = np.random.default_rng(0).normal(size=(64, 5, 4, 2))
RANDOM = [
    augmentation.RandomFlip(),
    augmentation.RandomRotation((-0.2, 0.2)),
    augmentation.RandomZoom((0.7, 1.2), (0.7, 1.2)),
    augmentation.RandomTranslation((-0.5, 0.5), (-0.5, 0.5)),
    augmentation.RandomContrast((0.5, 1.5), (-9, 9)),
    augmentation.RandomBrightness((-0.1, 0.1), (-9, 9)),
    augmentation.RandomCrop((3, 2)),
]


def changed(layer: Layer, seed: int, images: np.ndarray = IMAGES) -> np.ndarray:
    y: np.ndarray = layer.apply({}, {}, images, TrainingContext(seed))[0]
    assert y.shape[1:] == layer.output_shape(images.shape[1:])
    return y


@pytest.mark.parametrize("layer", RANDOM, ids=lambda it: type(it).__name__)
def test_the_seed_determines_the_change_and_evaluation_has_none(layer: Layer) -> None:
    np.testing.assert_array_equal(changed(layer, 3), changed(layer, 3))
    assert (changed(layer, 3) != changed(layer, 4)).any()
    evaluated = layer.apply({}, {}, IMAGES, False)[0]
    cropped = isinstance(layer, augmentation.RandomCrop)
    expected = augmentation.CenterCrop((3, 2)).apply({}, {}, IMAGES, False)[0] if cropped else IMAGES
    np.testing.assert_array_equal(evaluated, expected)


def test_half_of_the_images_are_flipped() -> None:
    for layer, axes in (
        (augmentation.RandomFlip(vertical=False), (2,)),
        (augmentation.RandomFlip(horizontal=False), (1,)),
        (augmentation.RandomFlip(), (1, 2)),
    ):
        y, _, pull = layer.apply({}, {}, IMAGES, TrainingContext(1))
        flipped = (y != IMAGES).any(axis=(1, 2, 3))
        assert 16 < flipped.sum() < 48
        np.testing.assert_array_equal(y[flipped], np.flip(IMAGES, axes)[flipped])
        np.testing.assert_array_equal(pull(y)[1], IMAGES)


def test_each_image_has_numbers_within_the_bounds() -> None:
    zeros = np.zeros((200, 1, 1, 1))
    added = changed(augmentation.RandomBrightness((-0.1, 0.3), (-5, 5)), 1, zeros).ravel()
    assert -1 <= added.min() < -0.9
    assert 2.9 < added.max() <= 3
    ramp = np.broadcast_to(np.arange(9.0)[:, None, None], (200, 9, 9, 1))
    moved = 4 - changed(augmentation.RandomTranslation((-0.3, 0.1), (0, 0)), 1, ramp)[:, 4, 0, 0]
    assert -2.7 <= moved.min() < -2.5
    assert 0.8 < moved.max() <= 0.9


def test_a_crop_is_taken_from_anywhere() -> None:
    images = np.arange(20.0).reshape(1, 5, 4, 1)
    found = {float(changed(augmentation.RandomCrop((3, 3)), seed, images)[0, 0, 0, 0]) for seed in range(60)}
    assert found == {0, 1, 4, 5, 8, 9}


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: augmentation.RandomRotation((0, 1), fill_mode="mirror"), "fill_mode is 'mirror'; give one of reflect"),  # type: ignore[arg-type]
        (lambda: augmentation.RandomZoom((1, 1), interpolation="cubic"), "interpolation is 'cubic'; give one of bil"),  # type: ignore[arg-type]
        (lambda: augmentation.CenterCrop((0, 1)), r"size is \(0, 1\)"),
    ],
)
def test_other_settings_are_refused(make: type[Layer], match: str) -> None:
    with pytest.raises(errors.InvalidLayer, match=match):
        make()
