"""Sums over all axes but the channels, and BatchNorm's maps: on the CPU, and with a fake of the kernels of a GPU."""

import sys
from typing import Any

import numpy as np
import pytest

from shoal_nn._ops import channels
from support.devices.channel_checks import DTYPES, SHAPES, check_statistics, check_sums_and_maps
from support.devices.fake_cupy import FakeArray, fake_cupy


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())


def on_the_gpu(array: np.ndarray) -> np.ndarray:
    return array.copy().view(FakeArray)


def on_the_host(array: np.ndarray) -> np.ndarray:
    assert isinstance(array, FakeArray)
    return array.view(np.ndarray)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_and_maps_are_those_of_float64(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    check_sums_and_maps(shape, dtype, np.asarray, np.asarray)


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gpu_gets_kernels_for_each_shape_and_dtype(shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    check_sums_and_maps(shape, dtype, on_the_gpu, on_the_host)


def test_statistics_are_those_of_float64() -> None:
    check_statistics(np.asarray, np.asarray)


@pytest.mark.usefixtures("cupy")
def test_statistics_on_a_gpu_are_those_of_float64() -> None:
    check_statistics(on_the_gpu, on_the_host)


@pytest.mark.usefixtures("cupy")
def test_arrays_that_are_parts_of_others_are_loaded_one_by_one() -> None:
    whole = np.arange(4 * 65, dtype=np.float32).view(FakeArray)
    for start in range(4):
        x = whole[start : start + 4 * 64].reshape(4, 64)
        np.testing.assert_array_equal(channels.column_sums(x), np.asarray(x).sum(axis=0))
        dy = on_the_gpu(np.ones((4, 64), np.float32))
        mean = on_the_gpu(np.zeros(64, np.float32))
        sums, products = channels.gradient_sums(x, dy, mean)
        np.testing.assert_array_equal(products, np.asarray(x).sum(axis=0))
        np.testing.assert_array_equal(sums, np.asarray(x).sum(axis=0))


@pytest.mark.usefixtures("cupy")
def test_other_orders_and_dtypes_are_converted() -> None:
    x, dy = np.random.default_rng(0).standard_normal((2, 8, 6))
    mean = np.zeros(8)
    sums, products = channels.gradient_sums(
        on_the_gpu(dy.astype(np.float32)).T, on_the_gpu(x).T, on_the_gpu(mean.astype(np.float32))
    )
    np.testing.assert_allclose(sums, dy.sum(axis=1), rtol=1e-6)
    np.testing.assert_allclose(products, (dy * x).sum(axis=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(1_000_003, 4), (1_048_576, 16), (4, 512, 1024, 3)])
def test_sums_of_many_values_away_from_0_are_near(shape: tuple[int, ...]) -> None:
    x = 100 + 0.1 * np.random.default_rng(0).standard_normal(shape, np.float32)
    rows = x.reshape(-1, shape[-1])
    np.testing.assert_allclose(channels.column_sums(x), rows.sum(axis=0, dtype=np.float64), rtol=3e-7)
    squares = channels.centered_squares(x, np.zeros(shape[-1], np.float32))
    np.testing.assert_allclose(squares, np.square(rows, dtype=np.float64).sum(axis=0), rtol=1e-6)
