"""Image augmentation: each function compared with a plain loop, and draws that depend only on seed and sample."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from shoal import errors
from shoal.data import augment
from support.run_lengths import draws

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (6, 5, 7, 3), np.uint8)
PINNED = [[0.8786522330559431, 0.3109389311613353], [0.677575149400614, 0.2553380731811462]]


def refused(said: str) -> pytest.RaisesExc:
    return pytest.raises(errors.InvalidData, match=said)


def bilinear(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """As the definition has it, pixel by pixel, in float64."""
    image = image.astype(np.float64)
    result = np.empty((height, width, image.shape[2]))
    for row in range(height):
        for column in range(width):
            y = min(max((row + 0.5) * image.shape[0] / height - 0.5, 0), image.shape[0] - 1)
            x = min(max((column + 0.5) * image.shape[1] / width - 0.5, 0), image.shape[1] - 1)
            top, left = int(y), int(x)
            bottom, right = min(top + 1, image.shape[0] - 1), min(left + 1, image.shape[1] - 1)
            upper = image[top, left] * (1 - (x - left)) + image[top, right] * (x - left)
            lower = image[bottom, left] * (1 - (x - left)) + image[bottom, right] * (x - left)
            result[row, column] = upper * (1 - (y - top)) + lower * (y - top)
    return result


def test_flip_mirrors_the_chosen_images() -> None:
    flipped = augment.flip(IMAGES, np.array([True, False] * 3))
    np.testing.assert_array_equal(flipped[0], IMAGES[0][:, ::-1])
    np.testing.assert_array_equal(flipped[1], IMAGES[1])


def test_crop_takes_each_image_s_rectangle() -> None:
    tops, lefts = np.array([0, 1, 2, 0, 1, 2]), np.array([0, 1, 2, 3, 2, 0])
    taken = augment.crop(IMAGES, tops, lefts, (3, 4))
    for image, whole, top, left in zip(taken, IMAGES, tops, lefts, strict=True):
        np.testing.assert_array_equal(image, whole[top : top + 3, left : left + 4])


def test_crop_outside_the_image_is_refused() -> None:
    ones = np.ones(6, np.int64)
    for tops, lefts, size in ((ones * 3, ones, (3, 4)), (ones, -ones, (3, 4)), (ones * 0, ones * 0, (6, 7))):
        with refused("not within images of 5 x 7"):
            augment.crop(IMAGES, tops, lefts, size)
    with refused("smaller than 6 x 7"):
        augment.crop(IMAGES[:0], ones[:0], ones[:0], (6, 7))


@settings(max_examples=draws(40), deadline=None)
@given(st.tuples(*[st.integers(1, 9)] * 4), st.sampled_from([np.float32, np.float64]))
def test_resize_is_bilinear_between_centres(
    sizes: tuple[int, int, int, int], dtype: type[np.float32] | type[np.float64]
) -> None:
    images = RNG.normal(size=(2, *sizes[:2], 2)).astype(dtype)
    resized = augment.resize(images, sizes[2:])
    assert resized.dtype == dtype
    expected = np.stack([bilinear(image, *sizes[2:]) for image in images])
    np.testing.assert_allclose(resized, expected, rtol=0, atol=1e-5 if dtype == np.float32 else 1e-12)


def test_resize_of_bytes_rounds() -> None:
    resized = augment.resize(IMAGES, (8, 3))
    assert resized.dtype == np.uint8
    expected = np.stack([bilinear(image, 8, 3) for image in IMAGES])
    assert np.abs(resized - expected).max() <= 0.5 + 1e-3


def test_resize_matches_pytorch() -> None:
    # torch.nn.functional.interpolate(torch.arange(4.)[None, None, None], size=(1, 8), mode="bilinear"), and to (1, 2)
    row = np.arange(4, dtype=np.float32)[np.newaxis, np.newaxis, :, np.newaxis]
    assert augment.resize(row, (1, 8)).ravel().tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]
    assert augment.resize(row, (1, 2)).ravel().tolist() == [0.5, 2.5]


def test_resize_matches_pillow_only_for_enlargement() -> None:
    grey = RNG.normal(size=(1, 8, 6, 1)).astype(np.float32)
    picture = Image.fromarray(grey[0, :, :, 0])
    larger = np.asarray(picture.resize((15, 9), Image.Resampling.BILINEAR))
    np.testing.assert_allclose(augment.resize(grey, (9, 15))[0, :, :, 0], larger, atol=1e-5)
    smaller = np.asarray(picture.resize((2, 2), Image.Resampling.BILINEAR))
    assert np.abs(augment.resize(grey, (2, 2))[0, :, :, 0] - smaller).max() > 0.01


def test_bytes_become_numbers_from_0_to_1() -> None:
    floats = augment.to_float(IMAGES)
    assert floats.dtype == np.float32
    np.testing.assert_allclose(floats, IMAGES / 255, rtol=2e-7)
    assert augment.to_float(np.full((1, 1, 1, 1), 255, np.uint8)).item() == 1
    assert augment.to_float(floats, np.float64).dtype == np.float64
    with refused("images are int16"):
        augment.to_float(IMAGES.astype(np.int16))


def test_normalise_is_by_channel() -> None:
    floats = augment.to_float(IMAGES, np.float64)
    mean, std = floats.mean((0, 1, 2)), floats.std((0, 1, 2))
    normal = augment.normalize(floats, mean, std)
    np.testing.assert_allclose(normal.mean((0, 1, 2)), 0, atol=1e-12)
    np.testing.assert_allclose(normal.std((0, 1, 2)), 1)
    assert augment.normalize(floats.astype(np.float32), 0.5, 2.0).dtype == np.float32
    for arguments, said in (
        ((IMAGES, 0, 1), "images are uint8; convert them with to_float first"),
        ((floats, [0, 0], 1), r"mean has the shape \(2,\)"),
        ((floats, 0, [1, 0, 1]), "a std is 0"),
        ((floats, np.nan, 1), "not finite"),
    ):
        with refused(said):
            augment.normalize(*arguments)


def test_draws_are_even_and_of_nothing_but_seed_and_sample() -> None:
    drawn = augment.uniforms(3, np.arange(20_000), 3)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = [np.histogram(column, 10, (0, 1))[0] for column in drawn.T]
    assert np.abs(np.array(counts) - 2000).max() < 5 * 2000**0.5
    near = (
        (drawn[:-1, 0], drawn[1:, 0]),
        (drawn[:, 0], drawn[:, 1]),
        (drawn[:, 0], augment.uniforms(4, np.arange(20_000), 1)[:, 0]),
    )
    assert all(abs(np.corrcoef(first, second)[0, 1]) < 0.03 for first, second in near)
    some = np.array([17, 4, 19_999])
    np.testing.assert_array_equal(augment.uniforms(3, some, 2), drawn[some, :2])


def test_the_numbers_drawn_do_not_change_from_release_to_release() -> None:
    drawn = augment.uniforms(1, np.array([0, 1]), 2)
    np.testing.assert_allclose(drawn, PINNED, rtol=0, atol=1e-16)


CHANGE = augment.Augmentation(
    augment.Flip(),
    augment.Crop(padding=2),
    augment.Augmentation(augment.Resize((4, 4)), augment.ToFloat()),
    augment.Normalize((0.5, 0.4, 0.3), 0.2),
)


def test_augmentation_does_not_depend_on_the_batch() -> None:
    before = IMAGES.copy()
    numbers = np.array([40, 7, 12, 3, 99, 1000])
    whole = CHANGE(IMAGES, seed=9, samples=numbers)
    assert (whole.shape, whole.dtype) == ((6, 4, 4, 3), np.dtype(np.float32))
    for part in ([5, 1], [2]):
        np.testing.assert_array_equal(CHANGE(IMAGES[part], seed=9, samples=numbers[part]), whole[part])
    assert (CHANGE(IMAGES, seed=10, samples=numbers) != whole).any()
    epochs = [CHANGE(IMAGES, seed=[9, epoch], samples=numbers) for epoch in (0, 1, 1)]
    assert (epochs[0] != epochs[1]).any()
    np.testing.assert_array_equal(epochs[1], epochs[2])
    np.testing.assert_array_equal(IMAGES, before)


def test_a_batch_s_seed_gives_each_image_its_own_draws() -> None:
    same = np.repeat(IMAGES[:1], 50, axis=0)
    changed = CHANGE(same, seed=2**63 - 1)
    assert len(np.unique(changed.reshape(50, -1), axis=0)) > 10
    np.testing.assert_array_equal(changed, CHANGE(same, seed=2**63 - 1))


def test_transforms_follow_their_draws() -> None:
    images = np.repeat(IMAGES[:1], 400, axis=0)
    flipped = (augment.Augmentation(augment.Flip(0.25))(images, seed=0) != images).any((1, 2, 3))
    assert 60 < flipped.sum() < 140
    never, always = (augment.Augmentation(augment.Flip(share))(images, seed=0) for share in (0, 1))
    np.testing.assert_array_equal(never, images)
    np.testing.assert_array_equal(always, images[:, :, ::-1])
    padded = np.pad(images[0], ((1, 1), (1, 1), (0, 0)))
    places = {padded[top : top + 5, left : left + 7].tobytes() for top in range(3) for left in range(3)}
    crops = augment.Augmentation(augment.Crop(padding=1))(images, seed=0)
    assert {image.tobytes() for image in crops} == places
    assert augment.Augmentation(augment.Crop(0, (2, 3)))(images, seed=0).shape == (400, 2, 3, 3)


def test_a_batch_of_no_images_stays_one() -> None:
    assert CHANGE(IMAGES[:0], seed=0).shape == (0, 4, 4, 3)


def test_invalid_augmentation_arguments_are_refused() -> None:
    with refused(r"images have the shape \(5, 7, 3\); give \[n, height, width, channels\]"):
        CHANGE(IMAGES[0], seed=0)
    with refused("6 images have 2 numbers"):
        CHANGE(IMAGES, seed=0, samples=np.arange(2))
    with refused("smaller than 9 x 9"):
        augment.Augmentation(augment.Crop(1, (9, 9)))(IMAGES, seed=0)
    flip: Any = augment.Flip
    with pytest.raises(TypeError):
        flip(0.5, 0)  # the drawn numbers are not an argument
    for wrong in (lambda: augment.Flip(2), lambda: augment.Crop(-1), lambda: augment.Crop(0, (0, 1))):
        with refused("must be|give"):
            wrong()
    with refused("size is"):
        augment.resize(IMAGES, (0, 3))
