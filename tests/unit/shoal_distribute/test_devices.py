"""Names of devices."""

import pytest

from shoal import errors
from shoal_distribute.devices import logical_device, logical_devices


@pytest.mark.parametrize(
    "name", ["cpu:1", "/cpu:1", "/CPU:1", "/device:CPU:1", "/job:localhost/replica:0/task:0/device:CPU:1"]
)
def test_a_device_has_one_name_however_it_is_written(name: str) -> None:
    assert logical_device(name).name == "/cpu:1"


@pytest.mark.parametrize("name", ["", "cpu", "/cpu", "tpu:0", "/gpu:x", "/cpu:-1", "/cpu:99999", None, 3])
def test_what_is_no_device_is_refused_with_examples(name: object) -> None:
    with pytest.raises(errors.DeviceUnavailable, match=r"/gpu:0"):
        logical_device(name)


def test_no_device_and_a_device_given_twice_are_refused() -> None:
    with pytest.raises(errors.DeviceUnavailable, match="at least one"):
        logical_devices([])
    with pytest.raises(errors.DeviceUnavailable, match=r"/cpu:0 is given more than once"):
        logical_devices(["/cpu:0", "cpu:0", "/cpu:1"])


def test_one_name_alone_is_one_device() -> None:
    assert [it.name for it in logical_devices("/cpu:3")] == ["/cpu:3"]
