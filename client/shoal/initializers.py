"""Initializers: the rules for a variable's values before the first push.

The values depend only on the seed, the variable's name and the element's index. Each server computes its own slices. A
variable starts with the same bits, whatever its partitioner and placement.
"""

import functools
import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar

import numpy as np

from shoal import errors
from shoal._numerics import is_finite_as, random_streams, storage_dtype
from shoal.v1 import tensor_pb2

# Each block of random values has its own generator, so that reaching an element draws at most this many values.
# A change of this number changes the initial values of every job.
_BLOCK_ELEMENTS = 65_536
# Normal draws never exceed this many standard deviations (probability 1 in 10^23).
_FURTHEST_SIGMAS = 10.0
# A double, which the message carries, represents every integer up to here.
_LARGEST_EXACT_INTEGER = 2.0**53
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class _Run:
    """Consecutive elements of a variable: its name and shape, the job's seed, and the index of the first element."""

    variable: str
    shape: tuple[int, ...]
    job_seed: int
    start: int


@dataclass(frozen=True)
class Initializer:
    """The rule for a variable's initial values: the base class of all initializers."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for parameter in self._parameters():
            object.__setattr__(self, parameter, self._number(parameter, getattr(self, parameter)))

    def to_proto(self) -> tensor_pb2.Initializer:
        """Returns the message that carries this initializer."""
        parameters = {parameter: getattr(self, parameter) for parameter in self._parameters()}
        return tensor_pb2.Initializer(name=self.name, parameters=parameters)

    def check(self, dtype: np.dtype) -> None:
        """Raises InvalidVariable if a variable of this dtype cannot hold the values."""
        if dtype.kind != "i" and not is_finite_as(dtype, self._largest()):
            raise self._invalid(f"values up to {self._largest():g} do not fit in {dtype}; choose a wider dtype")

    @classmethod
    @functools.cache
    def _parameters(cls) -> tuple[str, ...]:
        """Returns the names of the numeric fields. The message carries the seed in its own field."""
        return tuple(entry.name for entry in fields(cls) if entry.name != "seed")

    def _number(self, parameter: str, value: object) -> float:
        """Returns the value as a float, which the message carries."""
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise self._invalid(f"{parameter} is {value!r}; it must be a number")
        try:
            number = float(value)
        except OverflowError:  # an integer
            raise self._invalid(f"{parameter} is too large for a float; it must be finite") from None
        if not math.isfinite(number):
            raise self._invalid(f"{parameter} is {number}; it must be finite")
        return number

    def _largest(self) -> float:
        """Returns an upper bound of the absolute values, which the dtype must be able to hold."""
        return 1.0

    def _fill(self, out: np.ndarray, run: _Run, /) -> None:
        raise NotImplementedError

    def _invalid(self, what: str) -> errors.InvalidVariable:
        return errors.InvalidVariable(f"initializer {type(self).__name__}: {what}", initializer=self.name)


@dataclass(frozen=True)
class Zeros(Initializer):
    """Sets all elements to 0."""

    name: ClassVar[str] = "zeros"

    def _fill(self, out: np.ndarray, _: _Run, /) -> None:
        out.fill(0)


@dataclass(frozen=True)
class Given(Zeros):
    """Given values, which the value sender sends before the job runs.

    If a program or session passes an array as a variable, the variable has this initializer. If it passes the state of
    the optimizer, too, `state` is 1 plus the number of updates that the values have received; otherwise it is 0.
    """

    state: float = 0.0
    name: ClassVar[str] = "given"

    def to_proto(self) -> tensor_pb2.Initializer:
        return super().to_proto() if self.state else tensor_pb2.Initializer(name=self.name)  # for earlier versions

    def check(self, dtype: np.dtype) -> None:
        super().check(dtype)
        if self.state % 1 or not 0 <= self.state <= _LARGEST_EXACT_INTEGER:
            raise self._invalid(f"state is {self.state:g}; it must be a whole number from 0 to 2^53")


@dataclass(frozen=True)
class Ones(Initializer):
    """Sets all elements to 1."""

    name: ClassVar[str] = "ones"

    def _fill(self, out: np.ndarray, _: _Run, /) -> None:
        out.fill(1)


@dataclass(frozen=True)
class Constant(Initializer):
    """Sets all elements to one value.

    Args:
        value: a finite number; for an int64 variable, a whole number with an absolute value of at most 2^53.

    Raises:
        InvalidVariable: value is not a finite number.
    """

    value: float
    name: ClassVar[str] = "constant"

    def check(self, dtype: np.dtype) -> None:
        super().check(dtype)
        if dtype.kind == "i" and (self.value % 1 or abs(self.value) > _LARGEST_EXACT_INTEGER):
            raise self._invalid(f"value is {self.value}; for {dtype} it must be a whole number of at most 2^53")

    def _largest(self) -> float:
        return abs(self.value)

    def _fill(self, out: np.ndarray, _: _Run, /) -> None:
        out.fill(self.value)


@dataclass(frozen=True)
class _Random(Initializer):
    """Independent draws from one distribution, which may depend on the variable's shape."""

    seed: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        seed: object = self.seed
        if seed is None:
            return
        if not isinstance(seed, int) or isinstance(seed, bool) or not 0 < seed <= _MAX_SEED:
            raise self._invalid(
                f"seed is {seed!r}; it must be a whole number from 1 to 2^64 - 1, or None for the job's seed"
            )

    def to_proto(self) -> tensor_pb2.Initializer:
        message = super().to_proto()
        message.seed = self.seed or 0
        return message

    def check(self, dtype: np.dtype) -> None:
        super().check(dtype)
        if dtype.kind == "i":
            raise self._invalid(f"it draws real numbers, but the variable is {dtype}; use Zeros, Ones or Constant")

    def _draw(self, rng: np.random.Generator, count: int, shape: tuple[int, ...], /) -> np.ndarray:
        """Returns the first `count` float64 values of a block. A larger count must return the same first values."""
        raise NotImplementedError

    def _fill(self, out: np.ndarray, run: _Run, /) -> None:
        key = random_streams.key_of(self.seed or run.job_seed, run.variable)
        stop = run.start + out.size
        for block in range(run.start // _BLOCK_ELEMENTS, -(-stop // _BLOCK_ELEMENTS)):
            first = block * _BLOCK_ELEMENTS
            begin, end = max(run.start, first), min(stop, first + _BLOCK_ELEMENTS)
            drawn = self._draw(random_streams.stream(key, block), end - first, run.shape)[begin - first :]
            # float16 and bfloat16 are rounded from float32, as a server rounds its master values.
            out[begin - run.start : end - run.start] = drawn.astype(storage_dtype(out.dtype), copy=False)


@dataclass(frozen=True)
class Uniform(_Random):
    """Draws from the uniform distribution on [low, high). Rounding to the variable's dtype may give `high`.

    Args:
        low: finite, <= high.
        high: finite.
        seed: 1 to 2^64 - 1. None means the job's seed.

    Raises:
        InvalidVariable: an argument is out of its range.
    """

    low: float = -0.05
    high: float = 0.05
    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise self._invalid(f"low is {self.low} and high is {self.high}; low must not be above high")

    def _largest(self) -> float:
        return max(abs(self.low), abs(self.high))

    def _draw(self, rng: np.random.Generator, count: int, _: tuple[int, ...], /) -> np.ndarray:
        return random_streams.uniform(rng, count, self.low, self.high)


@dataclass(frozen=True)
class Normal(_Random):
    """Draws from a normal distribution.

    Args:
        mean: finite.
        stddev: standard deviation, finite, >= 0.
        seed: 1 to 2^64 - 1. None means the job's seed.

    Raises:
        InvalidVariable: an argument is out of its range.
    """

    mean: float = 0.0
    stddev: float = 0.05
    name: ClassVar[str] = "normal"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.stddev < 0:
            raise self._invalid(f"stddev is {self.stddev}; it must be 0 or more")

    def _largest(self) -> float:
        return abs(self.mean) + _FURTHEST_SIGMAS * self.stddev

    def _draw(self, rng: np.random.Generator, count: int, _: tuple[int, ...], /) -> np.ndarray:
        return self.mean + self.stddev * rng.standard_normal(count)


@dataclass(frozen=True)
class TruncatedNormal(Normal):
    """Draws from a normal distribution, truncated at 2 standard deviations from the mean.

    As in Keras, the result has a standard deviation of 0.88 stddev. `Normal` describes the arguments; `stddev` is that
    before the truncation.
    """

    name: ClassVar[str] = "truncated_normal"

    def _largest(self) -> float:
        return abs(self.mean) + 2 * self.stddev

    def _draw(self, rng: np.random.Generator, count: int, _: tuple[int, ...], /) -> np.ndarray:
        return self.mean + self.stddev * random_streams.truncated_normal(rng, count)


@dataclass(frozen=True)
class GlorotUniform(_Random):
    """Draws uniformly from +-sqrt(6 / (fan_in + fan_out)), for layers with symmetric activations.

    The variance is 2 / (fan_in + fan_out). As in Keras, the last two axes of a kernel are its inputs and outputs, and
    the axes before them are its receptive field: (3, 3, 64, 128) has fan_in `3*3*64` and fan_out `3*3*128`. Both fans
    of a vector are its length; those of a scalar are 1. Source: Glorot and Bengio, "Understanding the difficulty of
    training deep feedforward neural networks", AISTATS 2010.

    Args:
        seed: 1 to 2^64 - 1. None means the job's seed.

    Raises:
        InvalidVariable: seed is out of its range.
    """

    name: ClassVar[str] = "glorot_uniform"

    def _draw(self, rng: np.random.Generator, count: int, shape: tuple[int, ...], /) -> np.ndarray:
        return random_streams.uniform_of(rng, count, random_streams.glorot_variance(shape))


@dataclass(frozen=True)
class GlorotNormal(_Random):
    """Draws from a normal distribution, truncated at two sigma; `GlorotUniform` defines the fans and `seed`.

    As in Keras, the variance of the truncated values is 2 / (fan_in + fan_out).
    """

    name: ClassVar[str] = "glorot_normal"

    def _draw(self, rng: np.random.Generator, count: int, shape: tuple[int, ...], /) -> np.ndarray:
        return random_streams.truncated_normal_of(rng, count, random_streams.glorot_variance(shape))


@dataclass(frozen=True)
class HeUniform(_Random):
    """Draws uniformly from +-sqrt(6 / fan_in), for layers with ReLU; `GlorotUniform` defines fan_in and `seed`.

    The variance is 2 / fan_in. Source: He et al., "Delving deep into rectifiers", ICCV 2015.
    """

    name: ClassVar[str] = "he_uniform"

    def _draw(self, rng: np.random.Generator, count: int, shape: tuple[int, ...], /) -> np.ndarray:
        return random_streams.uniform_of(rng, count, random_streams.he_variance(shape))


@dataclass(frozen=True)
class HeNormal(_Random):
    """Draws from a normal distribution, truncated at two sigma; `GlorotUniform` defines fan_in and `seed`.

    As in Keras, the variance of the truncated values is 2 / fan_in.
    """

    name: ClassVar[str] = "he_normal"

    def _draw(self, rng: np.random.Generator, count: int, shape: tuple[int, ...], /) -> np.ndarray:
        return random_streams.truncated_normal_of(rng, count, random_streams.he_variance(shape))


_FIXED = (Zeros, Ones, Constant)
_DRAWN = (Uniform, Normal, TruncatedNormal, GlorotUniform, GlorotNormal, HeUniform, HeNormal)
_BY_NAME: dict[str, Callable[..., Initializer]] = {cls.name: cls for cls in (*_FIXED, *_DRAWN, Given)}


def from_proto(message: tensor_pb2.Initializer) -> Initializer:
    """Returns the initializer that a message carries.

    Raises:
        InvalidVariable: the name or a parameter is unknown, or a value is out of range.
    """
    return _decoded(message.SerializeToString(deterministic=True))


# Most of a job's variables have one of a few initializers.
@functools.lru_cache(maxsize=1024)
def _decoded(encoded: bytes) -> Initializer:
    message = tensor_pb2.Initializer.FromString(encoded)
    if message.name not in _BY_NAME:
        raise errors.InvalidVariable(
            f"there is no initializer {message.name!r}; choose one of {', '.join(_BY_NAME)}", initializer=message.name
        )
    seed = {"seed": message.seed} if message.seed else {}
    try:
        return _BY_NAME[message.name](**message.parameters, **seed)
    except TypeError as error:
        raise errors.InvalidVariable(
            f"initializer {message.name!r} does not take the parameters {sorted(message.parameters)}: {error}",
            initializer=message.name,
        ) from error


def fill(
    out: np.ndarray, initializer: Initializer, variable: str, shape: tuple[int, ...], job_seed: int, start: int = 0
) -> None:
    """Writes a variable's initial values into a flat array, block by block, without a second copy of a large array.

    Real numbers are drawn in float64 and rounded to the array's dtype; float16 and bfloat16 are rounded from float32.
    The same version of NumPy draws the same bits.

    Args:
        out: 1-D array for the elements [start, start + out.size) of the variable, in C order.
        initializer: initializer of the variable.
        variable: name of the variable.
        shape: shape of the whole variable.
        job_seed: 0 to 2^64 - 1, used if the initializer has no seed of its own.
        start: index of the first element.
    """
    initializer._fill(out, _Run(variable, shape, job_seed, start))


__all__ = [
    "Constant",
    "Given",
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "Initializer",
    "Normal",
    "Ones",
    "TruncatedNormal",
    "Uniform",
    "Zeros",
    "fill",
    "from_proto",
]
