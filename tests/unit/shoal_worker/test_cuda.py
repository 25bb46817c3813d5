"""GPU copies of the training loop, with a stand-in for CuPy: what each copy waits for, and reuse of pinned memory."""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shoal_worker.arrays import choose_device, fused
from shoal_worker.cuda import STAGE_BYTES, STAGES, Cuda
from support.devices.fake_cupy import FakeArray, FakeOutOfMemoryError, fake_cupy


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    cupy = fake_cupy(2)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    return cupy


def first_gpu() -> Cuda:
    device = choose_device("cuda:0")
    assert isinstance(device, Cuda)
    return device


def values(seed: int, *shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"v{index}": rng.normal(size=shape).astype(np.float32) for index, shape in enumerate(shapes)}


def check_same(found: Mapping[str, Any], wanted: Mapping[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(np.asarray(found[name]), array)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (0, 4)])
def test_any_array_goes_there_and_back(cupy: ModuleType, dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    device = first_gpu()
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    there = device.to_device(array)
    assert isinstance(there, FakeArray)
    assert there.dtype == array.dtype
    back = device.to_host(there)
    assert type(back) is np.ndarray
    assert back.shape == shape
    np.testing.assert_array_equal(back, array)


def test_arrays_that_do_not_lie_in_one_run_go_there_and_back(cupy: ModuleType) -> None:
    device = first_gpu()
    array = np.arange(12.0).reshape(3, 4).T
    there = device.to_device(array)
    np.testing.assert_array_equal(np.asarray(there), array)
    np.testing.assert_array_equal(device.to_host(there.T), array.T)


def test_an_array_that_is_there_stays(cupy: ModuleType) -> None:
    device = first_gpu()
    there = cupy.empty((2,))
    assert device.to_device(there) is there


def test_the_source_of_an_upload_may_change_at_once(cupy: ModuleType) -> None:
    device = first_gpu()
    given = {"a": np.zeros(4, np.float32)}
    brought = device.upload(given)
    given["a"][:] = 7
    np.testing.assert_array_equal(np.asarray(device.receive(brought)["a"]), np.zeros(4))


def test_pulls_of_any_size_go_through_a_few_pinned_buffers(cupy: ModuleType) -> None:
    device = first_gpu()
    large = values(1, (3 * STAGE_BYTES // 4 + 5,), (10,), (STAGE_BYTES,), (0,), (7, 3))
    for _ in range(3):
        check_same(device.receive(device.upload(large)), large)
    assert cupy.pinned == [STAGE_BYTES] * STAGES


def test_a_pull_is_brought_while_the_last_one_is_computed_on(cupy: ModuleType) -> None:
    device = first_gpu()
    pulls = [values(seed, (5, 3), (4,)) for seed in range(4)]
    first = device.receive(device.upload(pulls[0]))
    for now, following in itertools.pairwise(pulls):
        brought = device.upload(following)
        check_same(first, now)
        first = device.receive(brought)
    check_same(first, pulls[-1])


def test_memory_of_a_pull_is_given_back_once_computation_has_gone_on(
    cupy: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was received is kept until an upload waits for the end of the computation on it."""
    device = first_gpu()
    waited = []
    for step in range(4):
        over = [computed for _, computed in device.retired]
        brought = device.upload(values(step, (3,)))
        assert device.upload_stream.waits[-len(over) :] == over, "an upload waits for the end of computation"
        assert len(device.retired) == 0
        device.receive(brought)
        waited.append(len(device.retired))
    assert waited == [0, 1, 1, 1]
    [(retired, _)] = device.retired
    np.testing.assert_array_equal(np.asarray(retired["v0"]), values(2, (3,))["v0"])


def test_a_batch_waits_for_the_computation_that_had_its_memory_before(cupy: ModuleType) -> None:
    device = first_gpu()
    device.to_device(np.ones(3))
    compute, uploads = cupy.cuda.get_current_stream(), device.upload_stream
    assert [event.stream for event in uploads.waits] == [compute]
    assert [event.stream for event in compute.waits] == [uploads]


def test_a_download_waits_for_the_computation_of_its_array(cupy: ModuleType) -> None:
    device = first_gpu()
    device.to_host(cupy.empty((3,)))
    assert [event.stream for event in device.download_stream.waits] == [cupy.cuda.get_current_stream()]


def test_values_that_were_not_uploaded_are_uploaded_on_receipt(cupy: ModuleType) -> None:
    given = values(1, (3,))
    check_same(first_gpu().receive(given), given)


def test_gradients_are_fetched_in_their_order_while_later_ones_are_computed(cupy: ModuleType) -> None:
    device = first_gpu()
    wanted = values(2, *[(3, 2)] * 9)
    asked = []

    def gradients() -> Iterator[tuple[str, FakeArray]]:
        for name, array in wanted.items():
            asked.append(name)
            yield name, array.view(FakeArray)

    fetched = device.download(gradients())
    name, _ = next(fetched)
    assert name == "v0"
    assert 1 < len(asked) < 9, "some are asked for before the first is awaited, and not all"
    check_same(dict([(name, wanted[name]), *fetched]), wanted)


@pytest.mark.parametrize(
    ("version", "wire", "comes"),
    [
        ("14.2.0", "bfloat16", "bfloat16"),
        ("14.2.0", "float16", "float16"),
        ("13.6.0", "float16", "float16"),
        ("13.6.0", "bfloat16", "float32"),  # it has none: it is cast on the host
    ],
)
def test_gradients_come_down_in_the_half_that_they_travel_in(
    cupy: ModuleType, monkeypatch: pytest.MonkeyPatch, version: str, wire: str, comes: str
) -> None:
    monkeypatch.setattr(cupy, "__version__", version)
    given = values(6, (3, 2))["v0"]
    arrays = {"f": given.view(FakeArray), "n": np.arange(3).view(FakeArray), "h": given, "x": 1.5}
    found = dict(first_gpu().download(arrays.items(), np.dtype(wire)))
    assert [found[name].dtype.name for name in "fnh"] == [comes, "int64", "float32"]
    np.testing.assert_array_equal(found["f"], given.astype(comes))
    assert cupy.pinned == [given.size * np.dtype(comes).itemsize, 24]


def test_downloads_lie_in_memory_of_their_own(cupy: ModuleType) -> None:
    device = first_gpu()
    wanted = values(3, (4,), (4,))
    found = dict(device.download((name, array.view(FakeArray)) for name, array in wanted.items()))
    check_same(found, wanted)
    assert not np.shares_memory(found["v0"], found["v1"])
    assert cupy.pinned == [16, 16]


def test_arrays_on_the_host_are_returned_unchanged(cupy: ModuleType) -> None:
    found = dict(first_gpu().download({"a": np.ones(2), "b": np.float32(3)}.items()))
    np.testing.assert_array_equal(found["a"], [1, 1])
    assert found["b"] == 3


def test_closing_the_iterator_completes_its_downloads(cupy: ModuleType) -> None:
    device = first_gpu()
    fetched = device.download(iter([(str(index), cupy.empty((2,))) for index in range(6)]))
    next(fetched)
    stream = device.download_stream
    assert not stream.idle
    fetched.close()
    assert stream.idle


@pytest.mark.parametrize(("limit", "asked"), [(0.0, []), (0.5, [{"fraction": 0.5}]), (6e9, [{"size": 6_000_000_000}])])
def test_the_pool_is_bounded(cupy: ModuleType, limit: float, asked: Sequence[Mapping[str, float]]) -> None:
    device = choose_device("cuda:1", limit)
    device.activate()
    assert cupy.pool.limits == asked
    assert device.memory() == {"used": 100, "pool": 200, "limit": 300}


def test_a_pull_that_does_not_fit_says_so(cupy: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy, "room", 100)
    with pytest.raises(FakeOutOfMemoryError, match="allocating 400 bytes"):
        first_gpu().upload({"a": np.zeros(100, np.float32)})


def test_a_fused_function_is_itself_on_numpy_and_a_kernel_on_cupy(cupy: ModuleType) -> None:
    @fused
    def _twice(xp: Any, x: np.ndarray, plus: int) -> Any:
        return xp.maximum(x, 0) * 2 + plus

    np.testing.assert_array_equal(_twice(np.array([-1.0, 2.0]), 1), [1, 5])
    assert cupy.kernels == []
    for _ in range(2):
        found = _twice(np.array([-1.0, 2.0]).view(FakeArray), 1)
        assert isinstance(found, FakeArray)
        np.testing.assert_array_equal(np.asarray(found), [1, 5])
    assert cupy.kernels == ["twice"]
