"""Choice of a device, with and without CuPy. A fake CuPy stands in where there is no GPU."""

import collections
import sys
from types import ModuleType

import numpy as np
import pytest

from shoal import errors
from shoal_worker.arrays import choose_device, namespace_of, on_host
from support.devices.fake_cupy import FakeArray, FakeRuntimeError, fake_cupy


@pytest.fixture
def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    cupy = fake_cupy(2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def test_auto_is_the_cpu_without_cupy(without_cupy: None) -> None:
    device = choose_device("auto")
    device.activate()
    array = np.arange(3.0)
    assert device.name == "cpu"
    assert "install shoal[gpu]" in device.reason
    assert device.xp is np
    assert device.to_device(array) is array
    assert device.to_host(array) is array
    assert namespace_of(array) is np


def test_the_cpu_can_be_asked_for_where_there_are_gpus(two_gpus: ModuleType) -> None:
    assert choose_device("cpu").name == "cpu"


def test_auto_is_the_first_gpu(two_gpus: ModuleType) -> None:
    device = choose_device("auto")
    assert device.name == "cuda:0 Fake 0"
    assert device.xp is two_gpus
    assert two_gpus.used == []  # choosing takes no memory


def test_a_gpu_is_used_once_it_is_activated(two_gpus: ModuleType) -> None:
    device = choose_device("cuda:1")
    device.activate()
    assert two_gpus.used == [1]
    array = np.arange(3.0)
    there = device.to_device(array)
    assert isinstance(there, FakeArray)
    assert namespace_of(there) is two_gpus
    assert namespace_of(array) is np
    for brought_back in (device.to_host(there), on_host(there)):
        assert type(brought_back) is np.ndarray
        np.testing.assert_array_equal(brought_back, array)
    assert on_host(array) is array


def test_batches_are_brought_over_whole(two_gpus: ModuleType) -> None:
    pair = collections.namedtuple("pair", "x y")
    array = np.zeros(2)
    batch = {"a": array, "b": [array, "text"], "c": (array, 3), "d": pair(array, None)}
    moved = choose_device("auto").put(batch)
    assert isinstance(moved["a"], FakeArray)
    assert isinstance(moved["b"][0], FakeArray)
    assert moved["b"][1] == "text"
    assert isinstance(moved["c"][0], FakeArray)
    assert isinstance(moved["d"], pair)
    assert isinstance(moved["d"].x, FakeArray)
    assert isinstance(batch["a"], np.ndarray)


def test_a_gpu_that_is_not_there_is_an_error(two_gpus: ModuleType) -> None:
    with pytest.raises(errors.ShoalError, match="cuda:2 does not exist: this machine has 2, cuda:0 to cuda:1"):
        choose_device("cuda:2")


def test_a_gpu_without_cupy_names_the_package_to_install(without_cupy: None) -> None:
    with pytest.raises(errors.ShoalError, match=r"install shoal\[gpu\]"):
        choose_device("cuda:0")


def test_a_broken_cuda_is_an_error_or_the_reason_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(FakeRuntimeError("cudaErrorInsufficientDriver")))
    with pytest.raises(errors.ShoalError, match="CUDA reports cudaErrorInsufficientDriver"):
        choose_device("cuda:0")
    device = choose_device("auto")
    assert (device.name, device.reason) == ("cpu", "CUDA reports cudaErrorInsufficientDriver")


def test_a_requested_device_has_no_reason(two_gpus: ModuleType) -> None:
    assert {choose_device(wish).reason for wish in ("cpu", "auto", "cuda:1")} == {""}


@pytest.mark.parametrize("wish", ["gpu", "cuda", "cuda:-1", "cuda:x", ""])
def test_a_wish_that_makes_no_sense(wish: str) -> None:
    with pytest.raises(errors.ShoalError, match="is unknown; choose auto, cpu or cuda:N"):
        choose_device(wish)
