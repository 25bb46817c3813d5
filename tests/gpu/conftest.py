"""Fixture of a GPU. If there is none, it skips the test with the reason."""

import pytest

from shoal import errors
from shoal_worker.arrays import choose_device
from shoal_worker.devices import Device


@pytest.fixture
def device() -> Device:
    try:
        device = choose_device("cuda:0")
    except errors.DeviceUnavailable as error:
        pytest.skip(error.message)
    device.activate()
    return device
