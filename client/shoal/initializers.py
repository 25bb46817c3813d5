"""Initializers: what a variable's values are before the first push.

The values are a function of the seed, the variable's name and the element's index alone. Servers compute them where the
slices lie, and however a variable is cut, and wherever its slices go, it starts from the same bits.
"""

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import ClassVar

import numpy as np

from shoal import errors
from shoal._numerics import random_streams, storage_dtype
from shoal.v1 import tensor_pb2

# Random values come in blocks, each from a generator of its own, so an element is reached by drawing at most so many.
# Part of what the values are a function of: changing it changes how every job starts.
_BLOCK_ELEMENTS = 65_536
# Values this many sigmas out are never drawn (1 in 10^23).
_FURTHEST_SIGMAS = 10.0
# Every integer up to here is a double, which is what the wire carries.
_LARGEST_EXACT_INTEGER = 2.0**53
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class _Run:
    """Consecutive elements of a variable: which one, its shape, the job's seed, and the index of the first element."""

    variable: str
    shape: tuple[int, ...]
    job_seed: int
    start: int


@dataclass(frozen=True)
class Initializer:
    """How a variable's values begin. One of the classes below."""

    name: ClassVar[str]

    def __post_init__(self) -> None:
        for parameter in self._parameters():
            object.__setattr__(self, parameter, self._number(parameter, getattr(self, parameter)))

    def to_proto(self) -> tensor_pb2.Initializer:
        """The message that carries this initializer."""
        parameters = {parameter: getattr(self, parameter) for parameter in self._parameters()}
        return tensor_pb2.Initializer(name=self.name, parameters=parameters)

    def check(self, dtype: np.dtype) -> None:
        """Raises InvalidVariable if a variable of this dtype cannot hold the values."""
        if dtype.kind == "i":
            return
        with np.errstate(over="ignore"):
            fits = np.isfinite(np.float64(self._largest()).astype(dtype))
        if not fits:
            raise self._invalid(f"values up to {self._largest():g} do not fit in {dtype}; choose a wider dtype")

    def _parameters(self) -> list[str]:
        """Names of the numbers among the fields; the seed travels apart from them."""
        return [entry.name for entry in fields(self) if entry.name != "seed"]

    def _number(self, parameter: str, value: object) -> float:
        """The value as the wire carries it."""
        if not isinstance(value, numbers.Real) or isinstance(value, bool):
            raise self._invalid(f"{parameter} is {value!r}; it must be a number")
        try:
            number = float(value)
        except OverflowError:  # an integer
            raise self._invalid(f"{parameter} is beyond what a float holds; it must be finite") from None
        if not math.isfinite(number):
            raise self._invalid(f"{parameter} is {number}; it must be finite")
        return number

    def _largest(self) -> float:
        """A bound of the absolute values, which the dtype has to hold."""
        return 1.0

    def _fill(self, out: np.ndarray, run: _Run, /) -> None:
        raise NotImplementedError

    def _invalid(self, what: str) -> errors.InvalidVariable:
        return errors.InvalidVariable(f"initializer {type(self).__name__}: {what}", initializer=self.name)


@dataclass(frozen=True)
class Zeros(Initializer):
    """All 0."""

    name: ClassVar[str] = "zeros"

    def _fill(self, out: np.ndarray, _: _Run, /) -> None:
        out.fill(0)


@dataclass(frozen=True)
class Given(Zeros):
    """Values that are sent before the job runs; 0 until then. What an array among a job's variables stands for."""

    name: ClassVar[str] = "given"


@dataclass(frozen=True)
class Ones(Initializer):
    """All 1."""

    name: ClassVar[str] = "ones"

    def _fill(self, out: np.ndarray, _: _Run, /) -> None:
        out.fill(1)


@dataclass(frozen=True)
class Constant(Initializer):
    """All the same.

    Args:
        value: finite; of an int64 variable, a whole number of at most 2^53.

    Raises:
        InvalidVariable: value is not a finite number.
    """

    value: float
    name: ClassVar[str] = "constant"

    def check(self, dtype: np.dtype) -> None:
        super().check(dtype)
        if dtype.kind == "i" and (self.value % 1 or abs(self.value) > _LARGEST_EXACT_INTEGER):
            raise self._invalid(f"value is {self.value}; {dtype} takes whole numbers of at most 2^53")

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
            raise self._invalid(f"it draws real numbers, and the variable is {dtype}; use Zeros, Ones or Constant")

    def _draw(self, rng: np.random.Generator, count: int, shape: tuple[int, ...], /) -> np.ndarray:
        """The first `count` values of a block, float64; more of them must begin with the same ones."""
        raise NotImplementedError

    def _fill(self, out: np.ndarray, run: _Run, /) -> None:
        key = random_streams.key_of(self.seed or run.job_seed, run.variable)
        stop = run.start + out.size
        for block in range(run.start // _BLOCK_ELEMENTS, -(-stop // _BLOCK_ELEMENTS)):
            first = block * _BLOCK_ELEMENTS
            begin, end = max(run.start, first), min(stop, first + _BLOCK_ELEMENTS)
            drawn = self._draw(random_streams.stream(key, block), end - first, run.shape)[begin - first :]
            # Both halves are rounded from float32, as a server rounds its master values.
            out[begin - run.start : end - run.start] = drawn.astype(storage_dtype(out.dtype), copy=False)


@dataclass(frozen=True)
class Uniform(_Random):
    """Draws from [low, high); rounding to the variable's dtype may reach `high`.

    Args:
        low: finite, <= high.
        high: finite.
        seed: instead of the job's, 1 to 2^64 - 1.

    Raises:
        InvalidVariable: an argument is out of its range.
    """

    low: float = -0.05
    high: float = 0.05
    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise self._invalid(f"low is {self.low}, above high, {self.high}; exchange them")

    def _largest(self) -> float:
        return max(abs(self.low), abs(self.high))

    def _draw(self, rng: np.random.Generator, count: int, _: tuple[int, ...], /) -> np.ndarray:
        return random_streams.uniform(rng, count, self.low, self.high)


@dataclass(frozen=True)
class Normal(_Random):
    """Draws from a normal distribution.

    Args:
        mean: finite.
        stddev: finite, >= 0.
        seed: instead of the job's, 1 to 2^64 - 1.

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
    """Draws from a normal distribution; values more than 2 stddev from the mean are drawn again.

    What is left has a standard deviation of 0.88 stddev, as with Keras.

    Args:
        mean: finite.
        stddev: of the normal distribution before it is truncated, finite, >= 0.
        seed: instead of the job's, 1 to 2^64 - 1.

    Raises:
        InvalidVariable: an argument is out of its range.
    """

    name: ClassVar[str] = "truncated_normal"

    def _largest(self) -> float:
        return abs(self.mean) + 2 * self.stddev

    def _draw(self, rng: np.random.Generator, count: int, _: tuple[int, ...], /) -> np.ndarray:
        return self.mean + self.stddev * random_streams.truncated_normal(rng, count)


@dataclass(frozen=True)
class GlorotUniform(_Random):
    """Uniform on +-sqrt(6 / (fan_in + fan_out)), for layers with symmetric activations (Glorot and Bengio, 2010).

    The variance is 2 / (fan_in + fan_out). As with Keras, a kernel's last two axes are its inputs and outputs, and
    those before them its receptive field: (3, 3, 64, 128) has fan_in 3*3*64 and fan_out 3*3*128. Both fans of a
    vector are its length, those of a scalar 1. "Understanding the difficulty of training deep feedforward neural
    networks", AISTATS 2010.

    Args:
        seed: instead of the job's, 1 to 2^64 - 1.

    Raises:
        InvalidVariable: seed is out of its range.
    """

    name: ClassVar[str] = "glorot_uniform"

    def _draw(self, rng: np.random.Generator, count: int, shape: tuple[int, ...], /) -> np.ndarray:
        return random_streams.uniform_of(rng, count, random_streams.glorot_variance(shape))


@dataclass(frozen=True)
class GlorotNormal(_Random):
    """Normal with variance 2 / (fan_in + fan_out), truncated at two sigma; fans as for `GlorotUniform`.

    The variance is that of the truncated values, as with Keras.
    """

    name: ClassVar[str] = "glorot_normal"

    def _draw(self, rng: np.random.Generator, count: int, shape: tuple[int, ...], /) -> np.ndarray:
        return random_streams.truncated_normal_of(rng, count, random_streams.glorot_variance(shape))


@dataclass(frozen=True)
class HeUniform(_Random):
    """Uniform on +-sqrt(6 / fan_in), for layers with ReLU (He et al., 2015); fans as for `GlorotUniform`.

    The variance is 2 / fan_in. "Delving deep into rectifiers", ICCV 2015.
    """

    name: ClassVar[str] = "he_uniform"

    def _draw(self, rng: np.random.Generator, count: int, shape: tuple[int, ...], /) -> np.ndarray:
        return random_streams.uniform_of(rng, count, random_streams.he_variance(shape))


@dataclass(frozen=True)
class HeNormal(_Random):
    """Normal with variance 2 / fan_in, truncated at two sigma; fans as for `GlorotUniform`.

    The variance is that of the truncated values, as with Keras.
    """

    name: ClassVar[str] = "he_normal"

    def _draw(self, rng: np.random.Generator, count: int, shape: tuple[int, ...], /) -> np.ndarray:
        return random_streams.truncated_normal_of(rng, count, random_streams.he_variance(shape))


_BY_NAME: dict[str, Callable[..., Initializer]] = {
    cls.name: cls
    for cls in (
        Zeros,
        Ones,
        Constant,
        Uniform,
        Normal,
        TruncatedNormal,
        GlorotUniform,
        GlorotNormal,
        HeUniform,
        HeNormal,
        Given,
    )
}


def from_proto(message: tensor_pb2.Initializer) -> Initializer:
    """The initializer that a message carries.

    Raises:
        InvalidVariable: there is none of that name, or not with those parameters.
    """
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
    """Writes a variable's initial values into a flat array, block by block: no second copy is made of a large one.

    Real numbers are drawn in float64 and rounded to the array's dtype, to both halves by way of float32. Whoever runs
    the same version of NumPy draws the same bits.

    Args:
        out: 1-D; takes the elements [start, start + out.size) of the variable, in C order.
        initializer: of the variable.
        variable: its name.
        shape: of the whole variable.
        job_seed: 0 to 2^64 - 1; counts where the initializer has no seed of its own.
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
