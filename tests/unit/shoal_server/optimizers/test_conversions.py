"""Conversion of received and sent values: bit for bit as in NumPy and ml_dtypes, at any offset; finds NaN and Inf."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_server.optimizers import conversions, kernels
from shoal_server.optimizers.kernel_threads import KernelThreads

HALVES = (np.float16, ml_dtypes.bfloat16)
KEPT = (np.float32, np.float64, np.int64)
RECEIVED = [*((dtype, dtype) for dtype in KEPT), *((np.float32, half) for half in HALVES)]
SENT = [(wire, kept) for kept, wire in RECEIVED]
GUARD = 0xAB
KERNEL_THREADS = {helpers: KernelThreads(helpers, clock=lambda: 0.0) for helpers in (0, 3)}


@pytest.fixture(scope="module", autouse=True)
def warm() -> None:
    kernels.warm_up()


class Memory:
    """A flat array somewhere in memory, whose surroundings are watched."""

    def __init__(self, dtype: Any, size: int, offset: int) -> None:
        nbytes = size * np.dtype(dtype).itemsize
        self._whole = np.full(64 + nbytes + 64, GUARD, np.uint8)
        start = (offset - self._whole.ctypes.data) % 64
        self.array = self._whole[start : start + nbytes].view(dtype)
        self._before, self._behind = self._whole[:start], self._whole[start + nbytes :]

    @property
    def surroundings_are_unleased(self) -> bool:
        return bool(np.all(self._before == GUARD) and np.all(self._behind == GUARD))


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(f"u{array.dtype.itemsize}")


def cast(array: np.ndarray, dtype: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def is_finite(array: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):  # of a NaN that signals
        return np.asarray(np.isfinite(array))


def every_kind(dtype: Any, size: int, seed: int, *, finite: bool) -> np.ndarray:
    """Random bits, so of any exponent; and numbers as gradients are."""
    chance = np.random.default_rng(seed)
    x = np.frombuffer(chance.bytes(size * np.dtype(dtype).itemsize), dtype).copy()
    if dtype is np.int64:
        return x
    some = chance.random(size) < 0.5
    x[some] = cast(chance.standard_normal(size), dtype)[some]
    if finite:
        x[~is_finite(x)] = 1
    return x


SIZES = st.integers(0, 300) | st.integers(300, 5000)


@given(
    dtypes=st.sampled_from(RECEIVED),
    size=SIZES,
    seed=st.integers(0, 2**32),
    finite=st.booleans(),
    at=st.integers(0, 63),
    writable=st.booleans(),
)
def test_receive_equals_numpy_and_says_whether_all_is_finite(
    dtypes: Any, size: int, seed: int, finite: bool, at: int, writable: bool
) -> None:
    source, target = Memory(dtypes[1], size, at), Memory(dtypes[0], size, 0)
    source.array[:] = every_kind(dtypes[1], size, seed, finite=finite)
    source.array.flags.writeable = writable
    assert conversions.receive(target.array, source.array) == bool(is_finite(source.array).all())
    assert np.array_equal(bits(target.array), bits(cast(source.array, dtypes[0])))
    assert target.surroundings_are_unleased


@given(
    dtypes=st.sampled_from([pair for pair in RECEIVED if pair[0] is not np.int64]),
    size=SIZES.filter(bool),
    where=st.floats(0, 1, exclude_max=True),
    bad=st.sampled_from([np.nan, -np.nan, np.inf, -np.inf]),
    at=st.integers(0, 63),
)
def test_one_bad_element_anywhere_is_found_and_copied(
    dtypes: Any, size: int, where: float, bad: float, at: int
) -> None:
    source, target = Memory(dtypes[1], size, at).array, np.zeros(size, dtypes[0])
    source[:] = ml_dtypes.finfo(dtypes[1]).max  # type: ignore[no-untyped-call]
    assert conversions.receive(target, source)
    source[int(where * size)] = bad
    assert not conversions.receive(target, source)
    assert np.array_equal(target, source.astype(dtypes[0]), equal_nan=True)


@given(dtypes=st.sampled_from(SENT), size=SIZES, seed=st.integers(0, 2**32), at=st.integers(0, 63))
def test_send_rounds_as_numpy(dtypes: Any, size: int, seed: int, at: int) -> None:
    target, source = Memory(dtypes[0], size, at), every_kind(dtypes[1], size, seed, finite=False)
    source.flags.writeable = False
    conversions.send(target.array, source)
    assert np.array_equal(bits(target.array), bits(cast(source, dtypes[0])))
    assert target.surroundings_are_unleased


@pytest.mark.parametrize("half", HALVES)
def test_every_half_is_widened_exactly_and_comes_back(half: Any) -> None:
    every = np.arange(1 << 16, dtype=np.uint16).view(half)
    wide, back = np.empty(every.size, np.float32), np.empty_like(every)
    assert not conversions.receive(wide, every)
    assert np.array_equal(bits(wide), bits(cast(every, np.float32)))
    assert [conversions.receive(wide[:1], every[i : i + 1]) for i in range(0, 1 << 16, 97)] == [
        bool(np.isfinite(number)) for number in every[::97].astype(np.float32)
    ]
    conversions.receive(wide, every)
    conversions.send(back, wide)
    number = ~np.isnan(wide)
    assert np.array_equal(bits(back)[number], bits(every)[number])
    assert np.isnan(back[~number].astype(np.float32)).all()


@pytest.mark.parametrize("half", HALVES)
def test_ties_and_their_neighbours_are_rounded_as_numpy_rounds(half: Any) -> None:
    """Half-way between two neighbours, and a float32's step to either side, for all of them, infinity included."""
    every = np.arange(1 << 15, dtype=np.uint16).view(half)
    every = every[np.isfinite(every.astype(np.float32))].astype(np.float64)
    ties = ((every[1:] + every[:-1]) / 2).astype(np.float32)
    largest = ml_dtypes.finfo(half).max  # type: ignore[no-untyped-call]
    ends = np.array([np.float64(largest) * 1.0005, 65519.996, 65520, 3.4e38, 1e-45, 2**-25, 0], np.float32)
    near = np.concatenate([ties, np.nextafter(ties, np.float32(0)), np.nextafter(ties, np.float32(np.inf)), ends])
    for source in (near, -near):
        target = np.empty(source.size, half)
        conversions.send(target, source)
        assert np.array_equal(bits(target), bits(cast(source, half)))


@given(payload=st.integers(1, 2**23 - 1), sign=st.booleans(), half=st.sampled_from(HALVES))
def test_every_nan_stays_one_with_the_payload_that_numpy_leaves_it(payload: int, sign: bool, half: Any) -> None:
    source = np.full(100, (sign << 31) | (0xFF << 23) | payload, np.uint32).view(np.float32)
    target, copied = np.empty(100, half), np.empty(100, np.float32)
    conversions.send(target, source)
    assert np.array_equal(bits(target), bits(cast(source, half)))
    assert not conversions.receive(copied, source)
    assert copied.tobytes() == source.tobytes()


@pytest.mark.parametrize("helpers", [0, 3])
@given(
    wire=st.sampled_from([np.float32, *HALVES]),
    sizes=st.lists(st.integers(0, 40), max_size=5),
    bad=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 39)), max_size=3),
)
def test_many_arrays_convert_as_one_by_one_with_any_helpers(
    helpers: int, wire: Any, sizes: list[int], bad: list[tuple[int, int]]
) -> None:
    sources = [np.arange(size).astype(wire) for size in sizes]
    found = {(which, at) for which, at in bad if which < len(sizes) and at < sizes[which]}
    for which, at in found:
        sources[which][at] = np.inf
    targets = [np.full(size, -1, np.float32) for size in sizes]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conversions, "kernel_threads", lambda: KERNEL_THREADS[helpers])
        patch.setattr(conversions, "PIECE_ELEMENTS", 7)
        patch.setattr(conversions, "LARGE_ELEMENTS", 20)
        first = min((which for which, _ in found), default=None)
        assert conversions.receive_all([*zip(targets, sources, strict=True)]) == first
        back = [np.zeros(size, wire) for size in sizes]
        conversions.send_all([*zip(back, targets, strict=True)])
    for target, source, sent in zip(targets, sources, back, strict=True):
        assert np.array_equal(target, source.astype(np.float32))
        assert sent.tobytes() == source.tobytes()


def test_few_elements_ask_for_no_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversions, "kernel_threads", lambda: pytest.fail("asked"))
    target = np.zeros((1 << 22) - 1, np.float32)
    assert conversions.receive_all([(target, np.ones_like(target))]) is None
    assert target.all()


def test_one_array_that_does_not_fit_is_refused_among_many() -> None:
    three, four = np.zeros(3, np.float32), np.ones(4, np.float32)
    for target, source in ((three, four), (np.zeros(4, np.float32), np.ones(3, np.float32))):
        for convert in (conversions.receive_all, conversions.send_all):
            before = np.zeros(2, np.float32)
            with pytest.raises(ValueError, match="cannot become"):
                convert([(before, np.ones(2, np.float32)), (target, source)])
            assert not before.any()


@pytest.mark.parametrize("convert", [conversions.receive, conversions.send])
@pytest.mark.parametrize(
    ("target", "source"),
    [
        (np.zeros(3, np.float32), np.ones(4, np.float32)),
        (np.zeros((3, 1), np.float32), np.ones((3, 1), np.float32)),
        (np.zeros(6, np.float32)[::2], np.ones(3, np.float32)),
        (np.zeros(3, np.float32), np.ones(6, np.float32)[::2]),
        (np.zeros(3, np.float32), np.ones(3, np.float64)),
        (np.zeros(3, np.float64), np.ones(3, np.float16)),
        (np.zeros(3, np.float16), np.ones(3, np.float16)),
        (np.zeros(3, np.float16), np.ones(3, ml_dtypes.bfloat16)),
        (np.zeros(3, np.int64), np.ones(3, np.float64)),
        (np.zeros(3, np.int32), np.ones(3, np.int32)),
        (np.zeros(3, ">f4"), np.ones(3, ">f4")),
    ],
)
def test_arrays_that_do_not_fit_are_refused_and_unchanged(convert: Any, target: np.ndarray, source: np.ndarray) -> None:
    with pytest.raises(ValueError, match="cannot become"):
        convert(target, source)
    assert not target.any()


def test_halves_are_widened_when_received_and_narrowed_when_sent_only() -> None:
    for half in HALVES:
        with pytest.raises(ValueError, match="cannot become"):
            conversions.send(np.zeros(3, np.float32), np.ones(3, half))
        with pytest.raises(ValueError, match="cannot become"):
            conversions.receive(np.zeros(3, half), np.ones(3, np.float32))
