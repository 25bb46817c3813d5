"""Copies, streams and the memory pool on a real device.

The tests in `tests/unit` check, with a stand-in for CuPy, what copies wait for.
"""

import numpy as np
import pytest
from numpy.typing import DTypeLike

from shoal import errors
from shoal_worker.arrays import choose_device, namespace_of
from shoal_worker.devices import Device
from shoal_worker.programs import as_out_of_memory_error

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.float64, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5), (3_000_001,)])
def test_arrays_go_there_and_back(device: Device, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    there = device.to_device(array)
    assert namespace_of(there) is device.xp
    np.testing.assert_array_equal(device.to_host(there), array)
    np.testing.assert_array_equal(device.to_host(there.T), array.T)


def test_values_of_a_pull_stay_valid_during_the_next_upload(device: Device) -> None:
    rng = np.random.default_rng(0)
    pulls = [{f"v{i}": rng.normal(size=(1000, 1000)).astype(np.float32) for i in range(8)} for _ in range(6)]
    brought = device.upload(pulls[0])
    for index, pull in enumerate(pulls):
        params = device.receive(brought)
        doubled = {name: value * 2 for name, value in params.items()}
        brought = device.upload(pulls[(index + 1) % len(pulls)])
        del params
        for name, value in device.download(doubled.items()):
            np.testing.assert_array_equal(value, pull[name] * 2)


def test_batch_that_does_not_fit_names_the_requested_memory(device: Device) -> None:
    with (
        pytest.raises(errors.ProgramError, match=r"with a batch of 64 samples: Out of memory allocating \d"),
        as_out_of_memory_error(
            "program a:b: loss_and_gradients, step 0,", f"{device.name}, with a batch of 64 samples"
        ),
    ):
        device.xp.empty(1 << 50, np.uint8)
    assert device.to_host(device.to_device(np.ones(3))).sum() == 3, "the device goes on"


def test_the_pool_has_a_limit() -> None:
    try:
        device = choose_device("cuda:0", 64 << 20)
    except errors.DeviceUnavailable as error:
        pytest.skip(error.message)
    device.activate()
    pool = device.xp.get_default_memory_pool()
    try:
        assert device.memory()["limit"] == 64 << 20
        with pytest.raises(MemoryError):
            device.xp.empty(65 << 20, np.uint8)
    finally:
        pool.set_limit(size=0)
