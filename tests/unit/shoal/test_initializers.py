import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal import errors, initializers
from shoal.initializers import (
    Constant,
    Given,
    GlorotNormal,
    GlorotUniform,
    HeNormal,
    HeUniform,
    Initializer,
    Normal,
    Ones,
    TruncatedNormal,
    Uniform,
    Zeros,
)
from shoal.v1 import tensor_pb2
from support.run_lengths import draws

# Without their types, for arguments of wrong types.
untyped_constant: Any = Constant
untyped_uniform: Any = Uniform
untyped_normal: Any = Normal
untyped_he_normal: Any = HeNormal

FIXED = [Zeros(), Ones(), Constant(2.5), Given()]
RANDOM = [
    Uniform(-1.0, 3.0),
    Normal(1.0, 2.0),
    TruncatedNormal(1.0, 2.0),
    GlorotUniform(),
    GlorotNormal(),
    HeUniform(),
    HeNormal(),
]
EVERY = FIXED + RANDOM
FLOAT32, FLOAT64 = np.dtype(np.float32), np.dtype(np.float64)
FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)
INT64 = np.dtype(np.int64)

SHAPE = (500, 400)  # over three blocks of 65,536


def draw(
    initializer: Initializer,
    shape: tuple[int, ...] = SHAPE,
    *,
    name: str = "layer/kernel",
    dtype: np.dtype = FLOAT64,
    seed: int = 1,
    start: int = 0,
    stop: int | None = None,
) -> np.ndarray:
    out = np.empty((math.prod(shape) if stop is None else stop) - start, dtype)
    initializers.fill(out, initializer, name, shape, seed, start)
    return out


@pytest.mark.parametrize("initializer", EVERY, ids=str)
@settings(max_examples=draws(15), deadline=None)
@given(data=st.data())
def test_values_do_not_depend_on_the_cut(initializer: Initializer, data: st.DataObject) -> None:
    size = math.prod(SHAPE)
    inner = data.draw(st.lists(st.sampled_from([1, 65_535, 65_536, 65_537, 131_072, 199_999]) | st.integers(0, size)))
    edges = sorted({0, *inner, size})
    parts = [draw(initializer, start=start, stop=stop) for start, stop in pairwise(edges)]
    np.testing.assert_array_equal(np.concatenate(parts), draw(initializer))


@pytest.mark.parametrize("initializer", RANDOM, ids=str)
def test_values_depend_on_seed_and_name(initializer: Initializer) -> None:
    values = draw(initializer, (8, 8))
    assert not np.array_equal(values, draw(initializer, (8, 8), seed=2))
    assert not np.array_equal(values, draw(initializer, (8, 8), name="layer/kernel2"))


def test_own_seed_stands_in_for_the_jobs() -> None:
    own = draw(Normal(seed=7), seed=1)
    np.testing.assert_array_equal(own, draw(Normal(seed=7), seed=2))
    np.testing.assert_array_equal(own, draw(Normal(), seed=7))


def test_largest_seeds_are_taken() -> None:
    assert np.isfinite(draw(Normal(seed=2**64 - 1), (4,))).all()
    assert np.isfinite(draw(Normal(), (4,), seed=2**64 - 1)).all()


def test_blocks_differ() -> None:
    values = draw(Normal())
    assert not np.array_equal(values[:65_536], values[65_536:131_072])


def test_values_are_those_of_earlier_versions() -> None:
    # Should NumPy ever change a stream, jobs on servers of different versions would start from different values.
    ends = [0, 69_999]
    uniform = draw(Uniform(0, 1), (70_000,), seed=42)[ends]
    normal = draw(Normal(0, 1), (70_000,), seed=42)[ends]
    assert uniform.tolist() == [0.4914357982066817, 0.34368584926499246]
    assert normal.tolist() == [-0.5284678625059915, -0.7102771710801932]


def moments(initializer: Initializer, shape: tuple[int, ...]) -> tuple[float, float, float, float]:
    values = draw(initializer, shape)
    return values.mean(), values.std(), values.min(), values.max()


def test_uniform_moments() -> None:
    mean, std, low, high = moments(Uniform(-1.0, 3.0), SHAPE)
    assert mean == pytest.approx(1.0, abs=0.02)
    assert std == pytest.approx(4 / math.sqrt(12), rel=0.01)
    assert -1.0 <= low < -0.99
    assert 2.99 < high < 3.0


def test_normal_moments() -> None:
    mean, std, low, high = moments(Normal(1.0, 2.0), SHAPE)
    assert mean == pytest.approx(1.0, abs=0.03)
    assert std == pytest.approx(2.0, rel=0.01)
    assert low < 1 - 3 * 2
    assert high > 1 + 3 * 2


def test_truncated_normal_moments() -> None:
    mean, std, low, high = moments(TruncatedNormal(1.0, 2.0), SHAPE)
    assert mean == pytest.approx(1.0, abs=0.03)
    assert std == pytest.approx(0.8796 * 2, rel=0.01)
    assert -3.0 <= low < -2.99
    assert 4.99 < high <= 5.0


@pytest.mark.parametrize(
    ("shape", "fan_in", "fan_out"),
    [
        ((), 1, 1),
        ((300,), 300, 300),
        ((500, 200), 500, 200),
        ((3, 3, 64, 128), 9 * 64, 9 * 128),
        ((5, 40, 500), 5 * 40, 5 * 500),
    ],
)
def test_scaled_variances_follow_the_fans(shape: tuple[int, ...], fan_in: int, fan_out: int) -> None:
    glorot, he = math.sqrt(2 / (fan_in + fan_out)), math.sqrt(2 / fan_in)
    for initializer, expected in (
        (GlorotUniform(), glorot),
        (GlorotNormal(), glorot),
        (HeUniform(), he),
        (HeNormal(), he),
    ):
        # More elements than the shape has, for the statistics.
        values = draw(initializer, shape, stop=200_000)
        assert values.mean() == pytest.approx(0, abs=0.02 * expected)
        assert values.std() == pytest.approx(expected, rel=0.01)
        furthest = math.sqrt(3) if isinstance(initializer, GlorotUniform | HeUniform) else 2 / 0.8796256610342398
        assert abs(values).max() == pytest.approx(furthest * expected, rel=0.001)


@pytest.mark.parametrize(
    ("initializer", "value"), [(Zeros(), 0), (Ones(), 1), (Constant(3.0), 3), (Given(), 0)], ids=str
)
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16, FLOAT32, FLOAT64, INT64], ids=str)
def test_fixed_values(initializer: Initializer, value: int, dtype: np.dtype) -> None:
    initializer.check(dtype)
    assert (draw(initializer, (7,), dtype=dtype) == value).all()


@pytest.mark.parametrize("initializer", RANDOM, ids=str)
@pytest.mark.parametrize("dtype", [FLOAT16, BFLOAT16], ids=str)
def test_halves_are_rounded_master_values(initializer: Initializer, dtype: np.dtype) -> None:
    masters = draw(initializer, (300,), dtype=FLOAT32)
    np.testing.assert_array_equal(draw(initializer, (300,), dtype=dtype), masters.astype(dtype))
    np.testing.assert_array_equal(masters, draw(initializer, (300,)).astype(FLOAT32))


@pytest.mark.parametrize(
    "initializer", [*EVERY, Uniform(seed=3), Normal(seed=2**64 - 1), GlorotUniform(seed=1)], ids=str
)
def test_proto_roundtrip(initializer: Initializer) -> None:
    assert initializers.from_proto(initializer.to_proto()) == initializer


def test_numbers_of_any_type_become_floats() -> None:
    initializer = untyped_uniform(np.float32(-0.5), np.int64(2))
    assert (initializer, type(initializer.low), type(initializer.high)) == (Uniform(-0.5, 2.0), float, float)
    assert initializers.from_proto(initializer.to_proto()) == initializer


def test_given_is_named_on_the_wire() -> None:
    assert Given().to_proto() == tensor_pb2.Initializer(name="given")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(math.nan), "initializer Constant: value is nan; it must be finite"),
        (lambda: Uniform(-math.inf, 0), "initializer Uniform: low is -inf; it must be finite"),
        (lambda: Uniform(1.0, -1.0), "initializer Uniform: low is 1.0 and high is -1.0; low must not be above high"),
        (lambda: Normal(0.0, -1.0), "initializer Normal: stddev is -1.0; it must be 0 or more"),
        (
            lambda: HeNormal(seed=0),
            "initializer HeNormal: seed is 0; it must be a whole number from 1 to 2^64 - 1, or None for the job's seed",
        ),
        (
            lambda: Normal(seed=2**64),
            "initializer Normal: seed is 18446744073709551616; it must be a whole number from 1 to 2^64 - 1, or "
            "None for the job's seed",
        ),
        (
            lambda: untyped_normal(seed="a"),
            "initializer Normal: seed is 'a'; it must be a whole number from 1 to 2^64 - 1, or None for the job's seed",
        ),
        (lambda: HeNormal(seed=True), "initializer HeNormal: seed is True; it must be a whole number"),
        (lambda: untyped_he_normal(seed=1.5), "initializer HeNormal: seed is 1.5; it must be a whole number"),
        (lambda: untyped_uniform(low="a"), "initializer Uniform: low is 'a'; it must be a number"),
        (lambda: untyped_constant(None), "initializer Constant: value is None; it must be a number"),
        (lambda: Constant(True), "initializer Constant: value is True; it must be a number"),
        (lambda: untyped_constant(np.zeros(2)), "initializer Constant: value is array([0., 0.]); it must be a number"),
        (lambda: Constant(10**400), "initializer Constant: value is too large for a float; it must be finite"),
        (
            lambda: Normal(stddev=-(10**400)),
            "initializer Normal: stddev is too large for a float; it must be finite",
        ),
        (
            lambda: Constant(70_000.0).check(FLOAT16),
            "initializer Constant: values up to 70000 do not fit in float16; choose a wider dtype",
        ),
        (
            lambda: Normal(0.0, 1e38).check(BFLOAT16),
            "initializer Normal: values up to 1e+39 do not fit in bfloat16; choose a wider dtype",
        ),
        (
            lambda: TruncatedNormal(0.0, 3e38).check(FLOAT32),
            "initializer TruncatedNormal: values up to 6e+38 do not fit in float32; choose a wider dtype",
        ),
        (
            lambda: Uniform(-1e5, 0.0).check(FLOAT16),
            "initializer Uniform: values up to 100000 do not fit in float16; choose a wider dtype",
        ),
        (
            lambda: Constant(0.5).check(INT64),
            "initializer Constant: value is 0.5; for int64 it must be a whole number of at most 2^53",
        ),
        (
            lambda: Constant(2.0**60).check(INT64),
            "initializer Constant: value is 1.152921504606847e+18; for int64 it must be a whole number of at most 2^53",
        ),
        (
            lambda: Normal().check(INT64),
            "initializer Normal: it draws real numbers, but the variable is int64; use Zeros, Ones or Constant",
        ),
        (
            lambda: initializers.from_proto(tensor_pb2.Initializer(name="lecun")),
            "there is no initializer 'lecun'; choose one of zeros, ones, constant, uniform, normal, truncated_normal, "
            "glorot_uniform, glorot_normal, he_uniform, he_normal, given",
        ),
        (
            lambda: initializers.from_proto(tensor_pb2.Initializer(name="zeros", parameters={"value": 1.0})),
            "initializer 'zeros' does not take the parameters ['value']",
        ),
        (
            lambda: initializers.from_proto(tensor_pb2.Initializer(name="constant")),
            "initializer 'constant' does not take the parameters []",
        ),
    ],
)
def test_invalid_initializer_raises_an_error_with_advice(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(errors.InvalidVariable) as raised:
        make()
    assert raised.value.message.startswith(message)
