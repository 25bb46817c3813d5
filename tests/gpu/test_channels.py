"""Kernels of sums over all axes but the channels, and of BatchNorm's maps, compared with float64."""

from typing import Any

import numpy as np
import pytest

from shoal_nn._ops import channels
from shoal_worker.devices import Device
from support.devices.channel_checks import DTYPES, SHAPES, check_statistics, check_sums_and_maps

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (1_000_003, 5), (64, 56, 56, 64), (3, 4096)], ids=str)
def test_sums_and_maps_are_those_of_float64(device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    check_sums_and_maps(shape, dtype, device.to_device, device.to_host)


def test_statistics_are_those_of_float64(device: Device) -> None:
    check_statistics(device.to_device, device.to_host)


def test_arrays_that_are_parts_of_others_are_summed(device: Device) -> None:
    values = np.random.default_rng(0).integers(0, 100, 4 * 65).astype(np.float32)
    whole = device.to_device(values)
    for start in range(4):
        found = channels.column_sums(whole[start : start + 4 * 64].reshape(4, 64))
        np.testing.assert_array_equal(device.to_host(found), values[start : start + 4 * 64].reshape(4, 64).sum(axis=0))


@pytest.mark.parametrize("shape", [(1_000_003, 4), (4, 512, 1024, 3)], ids=str)
def test_sums_of_many_values_away_from_0_are_near_and_have_the_same_bits(
    device: Device, shape: tuple[int, ...]
) -> None:
    x = 100 + 0.1 * np.random.default_rng(0).standard_normal(shape, np.float32)
    there = device.to_device(x)
    found = device.to_host(channels.column_sums(there))
    exact = x.reshape(-1, shape[-1]).sum(axis=0, dtype=np.float64)
    np.testing.assert_allclose(found, exact, rtol=3e-7)
    for _ in range(5):
        np.testing.assert_array_equal(device.to_host(channels.column_sums(there)), found)


def test_infinities_and_nans_stay(device: Device) -> None:
    for name in ("float32", "float16", "bfloat16"):
        dtype = next(dtype for dtype in DTYPES if dtype.name == name)
        x = np.ones((6, 8), dtype)
        x[0, 0], x[1, 1], x[2, 2] = np.inf, -np.inf, np.nan
        zero, one = (device.to_device(np.full(8, value, np.float32)) for value in (0, 1))
        found = device.to_host(channels.scaled(device.to_device(x), zero, one, zero))
        np.testing.assert_array_equal(found.astype(np.float32), x.astype(np.float32))
