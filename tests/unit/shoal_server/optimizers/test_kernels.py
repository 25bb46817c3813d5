"""Kernels alone: exact, the same bits for any division of an arena, vectorised, and compiled for the declared types."""

import itertools
import platform
import subprocess
import sys
from typing import Any

import ml_dtypes
import numba
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal_server.optimizers import arrays, compilation, conversions, kernel_threads, kernels
from shoal_server.optimizers.kernel_threads import KernelThreads

FLOATS = (np.float32, np.float64)
CHECKED = (np.float16, ml_dtypes.bfloat16, np.float32, np.float64)
BLOCK = kernels.BLOCK
SIZES = st.integers(0, 300) | st.sampled_from([BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 17])


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    kernels.warm_up()


@given(dtype=st.sampled_from(CHECKED), size=SIZES)
def test_finite_numbers_are_finite_up_to_the_largest(dtype: Any, size: int) -> None:
    limits = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    extremes = [limits.max, limits.min, limits.tiny, limits.smallest_subnormal, 0.0, -0.0, 1.0]
    x = np.resize(np.array(extremes, dtype), size)
    assert kernels.all_finite(x)


@given(
    dtype=st.sampled_from(CHECKED),
    size=SIZES.filter(bool),
    where=st.floats(0, 1, exclude_max=True),
    bad=st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]),
)
def test_one_bad_element_anywhere_is_found(dtype: Any, size: int, where: float, bad: float) -> None:
    x = np.ones(size, dtype)
    x[int(where * size)] = bad
    assert not kernels.all_finite(x)


@given(payload=st.integers(1, 2**23 - 1), sign=st.booleans(), index=st.integers(0, 99))
def test_every_nan_is_found_whatever_its_payload(payload: int, sign: bool, index: int) -> None:
    bits = np.zeros(100, np.uint32)
    bits[index] = (sign << 31) | (0xFF << 23) | payload
    assert not kernels.all_finite(bits.view(np.float32))


def test_integers_are_finite() -> None:
    assert kernels.all_finite(np.array([np.iinfo(np.int64).max, np.iinfo(np.int64).min, -1]))


def test_read_only_arrays_are_read() -> None:
    x = np.frombuffer(np.array([1, 2, np.inf], np.float32).tobytes(), np.float32)
    total = np.zeros(3, np.float32)
    kernels.accumulate(total, x, 2.0)
    assert total.tolist() == [2, 4, np.finfo(np.float32).max], "a mean is finite"
    assert not kernels.all_finite(x)
    assert kernels.all_finite(x[:2])


@pytest.mark.parametrize("dtype", FLOATS)
def test_accumulate_and_scale(dtype: Any) -> None:
    total = np.arange(1000, dtype=dtype)
    gradient = np.arange(1000, 0, -1, dtype=dtype)
    kernels.accumulate(total, gradient, 3.0)
    assert np.array_equal(total, np.arange(1000) + 3.0 * np.arange(1000, 0, -1))
    kernels.scale(total, 0.5)
    assert np.array_equal(total, (np.arange(1000) + 3.0 * np.arange(1000, 0, -1)) / 2)
    assert np.array_equal(gradient, np.arange(1000, 0, -1))


def test_accumulate_refuses_another_size_and_changes_nothing() -> None:
    total = np.ones(3)
    with pytest.raises(ValueError, match=r"\(4,\) elements to \(3,\)"):
        kernels.accumulate(total, np.ones(4), 1.0)
    assert total.tolist() == [1, 1, 1]


def adam(arrays: list[np.ndarray], bounds: list[int], decay: float) -> None:
    dtype = arrays[0].dtype.type
    numbers = [dtype(x) for x in (1e-2, 1.5, 0.9, 0.1, 0.99, 0.01, 1e-8, 1.0, 0.0)]
    setting_ranges = (np.array(bounds, np.int64), np.full(len(bounds) - 1, decay), np.ones(len(bounds) - 1))
    arguments: list[Any] = [*arrays, *setting_ranges, np.array([0, bounds[-1]]), *numbers]
    kernels.adam(*arguments)


def random_arena(dtype: Any, size: int) -> list[np.ndarray]:
    chance = np.random.default_rng(size)
    values, gradient, average = (chance.standard_normal(size).astype(dtype) for _ in range(3))
    return [values, gradient, average, chance.random(size).astype(dtype)]


@settings(deadline=None)
@given(dtype=st.sampled_from(FLOATS), size=st.integers(1, 400), cuts=st.lists(st.integers(0, 400), max_size=8))
def test_bits_do_not_depend_on_how_an_arena_is_cut(dtype: Any, size: int, cuts: list[int]) -> None:
    whole, parts, moved = (random_arena(dtype, size) for _ in range(3))
    adam(whole, [0, size], 0.1)
    adam(parts, [0, *sorted(min(cut, size) for cut in cuts), size], 0.1)
    for before, after in zip(whole, parts, strict=True):
        assert before.tobytes() == after.tobytes()
    # Nor on where an element lies: in the vectorised body or in what is left over.
    moved = [np.ascontiguousarray(array[::-1]) for array in moved]
    adam(moved, [0, size], 0.1)
    for before, after in zip(whole, moved, strict=True):
        assert before.tobytes() == after[::-1].tobytes()


def test_threads_claim_every_element_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the results of all of them count."""
    pool = KernelThreads(3, clock=lambda: 0.0)
    monkeypatch.setattr(kernel_threads, "kernel_threads", lambda: pool)
    monkeypatch.setattr(kernel_threads, "LARGE", 0)
    size = 20 * BLOCK + 17
    total, ones = np.zeros(size, np.float32), np.ones(size, np.float32)
    for count in range(1, 6):
        kernels.accumulate(total, ones, 1.0)
        assert np.all(total == count)
    kernels.scale(total, 0.2)
    assert np.all(total == 1)
    for index in range(0, size, BLOCK // 2 + 1):
        assert kernels.all_finite(total)
        total[index] = np.nan
        assert not kernels.all_finite(total)
        total[index] = 1


def test_small_arenas_ask_for_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_threads, "kernel_threads", lambda: pytest.fail("asked"))
    kernels.scale(np.ones(kernel_threads.LARGE - 1, np.float32), 2.0)


def test_setting_ranges_leave_the_rest_of_the_arena_alone() -> None:
    values, gradient = np.ones(10), np.ones(10)
    ranges = (np.array([2, 2, 5]), np.array([7.0, 1.0]), np.ones(2))
    kernels.sgd(values, gradient, *ranges, np.array([2, 5]), np.float64(0.25))
    assert values.tolist() == [1, 1, 0.5, 0.5, 0.5, 1, 1, 1, 1, 1]


def test_warm_kernels_compile_nothing() -> None:
    assert all(set(signatures) <= set(kernel.signatures) for kernel, signatures in compilation.registered)
    counts = [len(kernel.signatures) for kernel, _ in compilation.registered]
    assert kernels.warm_up() < 0.5  # nothing left to do
    float32, message = np.ones(2, np.float32), np.frombuffer(bytes(9), np.uint8)[1:]
    assert conversions.receive(float32, message.view(np.float32))
    assert conversions.receive(float32, message[:4].view(np.float16))
    conversions.send(np.ones(2, np.float16), float32)
    integers: Any = np.ones(2, np.int64)
    bounds = np.array([0, 2])
    with pytest.raises(TypeError, match="No matching definition"):
        kernels.sgd(integers, integers, bounds, np.zeros(1), np.ones(1), bounds, np.float64(1))
    assert counts == [len(kernel.signatures) for kernel, _ in compilation.registered]


# In a process of its own, for what is learned here once stays learned.
EVERY_CALL = """
import itertools
import sys
import numpy as np
from numba import types
from numba.core.dispatcher import Dispatcher
from numba.np.numpy_support import as_dtype
from shoal_server.optimizers import compilation, kernels

kernels.warm_up()
searched = []
search = Dispatcher._search_new_conversions
Dispatcher._search_new_conversions = lambda self, *args: searched.append(self) or search(self, *args)

def choices(each):
    if each is types.none:
        return [None]
    dtype = as_dtype(each.dtype if isinstance(each, types.Array) else each)
    if not isinstance(each, types.Array):
        return [dtype.type(0)]
    memory = np.zeros(5 * dtype.itemsize, np.uint8)
    arrays = [memory[start : start + 4 * dtype.itemsize].view(dtype) for start in ((0,) if each.aligned else (0, 1))]
    read_only = [] if each.mutable else [array.view() for array in arrays]
    for array in read_only:
        array.flags.writeable = False
    return arrays + read_only

calls = 0
for kernel, signatures in compilation.registered:
    for signature in signatures:
        for arguments in itertools.product(*map(choices, signature)):
            kernel(*arguments)
            calls += 1
print(calls, len(searched), int("scipy.linalg" in sys.modules))
"""


def test_warm_kernels_dispatch_without_conversions() -> None:
    """Which it does not do safely in several threads; arrays are read-only or not, and aligned or not."""
    done = subprocess.run([sys.executable, "-c", EVERY_CALL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    calls, searched, loaded = map(int, done.stdout.split())
    assert calls > 100
    assert searched == 0
    assert not loaded, "a server that loads scipy.linalg starts more slowly"


@pytest.mark.skipif(platform.machine() not in {"x86_64", "AMD64"}, reason="reads x86 assembly")
@pytest.mark.parametrize("name", ["adam", "adagrad", "rmsprop"])
def test_square_roots_are_vectorised(name: str) -> None:
    kernel: Any = getattr(kernels, name)
    options = {key: kernel.targetoptions[key] for key in ("nogil", "fastmath", "error_model")}
    signatures = next(signatures for known, signatures in compilation.registered if known is kernel)
    most = [s for s in signatures if s[0].dtype == numba.float32][-1]  # with every optional slot
    fresh = numba.njit(most, **options)(kernel.py_func)  # code from the cache has no assembly to read
    assert "sqrtps" in fresh.inspect_asm(most)


@given(elements=st.integers(0, 300), dtype=st.sampled_from([np.float32, np.float64, np.int64]))
def test_full_starts_on_a_cache_line(elements: int, dtype: Any) -> None:
    x = arrays.full(elements, 3, dtype)
    assert x.tolist() == [3] * elements
    assert x.dtype == dtype
    assert x.ctypes.data % 64 == 0 or not elements
    assert x.flags.writeable
    assert x.flags.c_contiguous


def test_large_arrays_start_far_apart() -> None:
    """Modulo 1 MiB, in pairs: an arena's values and slots."""
    starts = [arrays.empty(1 << 22, np.float32).ctypes.data for _ in range(8)]
    far = [(one - other) % (1 << 20) for one, other in itertools.permutations(starts, 2)]
    assert min(far) >= 1 << 16
    assert all(start % 64 == 0 for start in starts)


def test_warm_up_knows_every_kernel() -> None:
    known = {kernel.py_func.__name__ for kernel, _ in compilation.registered}
    updates = {"sgd", "momentum", "adagrad", "rmsprop", "adam", "ftrl"}
    conversions = {"_copy", "_widen_half", "_widen_bfloat", "_narrow_half", "_narrow_bfloat"}
    sums = {"_add_floats", "_add_integers", "_squares"}
    assert known == updates | conversions | sums | {"_accumulate", "_blend", "_scale", "_exponents_below"}
    variants = {kernel.py_func.__name__: len(signatures) for kernel, signatures in compilation.registered}
    assert variants["rmsprop"] == len(list(itertools.product(FLOATS, (False, True), (False, True))))


def test_no_kernel_keeps_a_reference_to_its_arrays() -> None:
    """Each update would leak memory. The first call may convert types, which Numba remembers."""
    for dispatcher, signatures in compilation.registered:
        for signature in signatures:
            arguments = next(compilation.samples(signature))
            dispatcher(*arguments)
            before = [sys.getrefcount(each) for each in arguments]
            for _ in range(3):
                dispatcher(*arguments)
            assert [sys.getrefcount(each) for each in arguments] == before, dispatcher.__name__
