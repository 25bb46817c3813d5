"""The distributions of initializers, and random numbers that depend only on a seed, a name and a position."""

import hashlib
import math
from typing import Any

import numpy as np


def key_of(seed: int, variable: str) -> int:
    """Returns a key for a variable's random numbers, different for each variable and seed."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + variable.encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def stream(key: int, block: int) -> np.random.Generator:
    """Returns the stream of a block, from the generator Philox.

    Philox computes its numbers from a key and a counter (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3",
    SC 2011). The upper half of the counter holds the block. Draws count in the lower half and never reach the upper.
    """
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, block, 0]))


# Standard deviation of a standard normal distribution truncated at two sigma.
_TRUNCATED_STDDEV = 0.87962566103423978
# The odd number nearest to 2**64 divided by the golden ratio. Its multiples are spread evenly (Knuth, TAOCP 3, 6.4).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(numbers: Any) -> Any:
    """Applies the finalizer of SplitMix64 to uint64 arrays on a host or a device.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def uniform(rng: np.random.Generator, count: int, low: float, high: float) -> np.ndarray:
    """Draws numbers from the uniform distribution over [low, high).

    Args:
        rng: a new stream.
        count: how many numbers.
        low: lower bound, included.
        high: upper bound, excluded.

    Returns:
        A float64 array of `count` elements.
    """
    return low + (high - low) * rng.random(count)


def truncated_normal(rng: np.random.Generator, count: int) -> np.ndarray:
    """Draws `count` standard normal numbers and redraws those beyond two sigma, which are about 5%."""
    kept = np.empty(count)
    found = 0
    while found < count:
        drawn = rng.standard_normal(count - found)
        drawn = drawn[np.abs(drawn) <= 2.0]
        kept[found : found + drawn.size] = drawn
        found += drawn.size
    return kept


def uniform_of(rng: np.random.Generator, count: int, variance: float) -> np.ndarray:
    """Draws numbers from the uniform distribution around 0 with a given variance.

    Args:
        rng: a new stream.
        count: how many numbers.
        variance: variance of the distribution.

    Returns:
        A float64 array of `count` elements.
    """
    limit = math.sqrt(3 * variance)
    return uniform(rng, count, -limit, limit)


def truncated_normal_of(rng: np.random.Generator, count: int, variance: float) -> np.ndarray:
    """Draws numbers from the normal distribution truncated at two sigma, with a given variance after truncation.

    Args:
        rng: a new stream.
        count: how many numbers.
        variance: variance of the truncated distribution.

    Returns:
        A float64 array of `count` elements.
    """
    return math.sqrt(variance) / _TRUNCATED_STDDEV * truncated_normal(rng, count)


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Returns fan-in and fan-out: the last two axes, each times the receptive field (all axes before them)."""
    if len(shape) < 2:
        length = shape[0] if shape else 1
        return length, length
    receptive_field = math.prod(shape[:-2])
    return receptive_field * shape[-2], receptive_field * shape[-1]


def glorot_variance(shape: tuple[int, ...]) -> float:
    """Returns the variance of Glorot initialization.

    Source: Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks" (2010).
    """
    return 2 / sum(fans(shape))


def he_variance(shape: tuple[int, ...]) -> float:
    """Returns the variance of He initialization (He et al., "Delving deep into rectifiers", ICCV 2015)."""
    return 2 / fans(shape)[0]
