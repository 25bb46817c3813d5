"""Random numbers that depend on a seed, a name and a place alone, and the spreads that initializers give them."""

import hashlib
import math
from typing import Any

import numpy as np


def key_of(seed: int, variable: str) -> int:
    """What tells a variable's numbers from those of every other variable and seed."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + variable.encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little")


def stream(key: int, block: int) -> np.random.Generator:
    """A block's own stream: the block is in the counter's upper half, which drawing never reaches.

    Philox is counter-based (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
    """
    return np.random.Generator(np.random.Philox(key=key, counter=[0, 0, block, 0]))


# Standard deviation of a unit normal whose values beyond two sigma are drawn again.
_TRUNCATED_STDDEV = 0.87962566103423978
# The odd number nearest to 2**64 over the golden ratio: multiples of it are spread evenly (Knuth, TAOCP 3, 6.4).
GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def splitmix64(numbers: Any) -> Any:
    """SplitMix64's finalizer (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).

    Of arrays of uint64, which wrap around, on a host or a device: a number for each, that looks like no other's.
    """
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))


def uniform(rng: np.random.Generator, count: int, low: float, high: float) -> np.ndarray:
    """The first `count` numbers of a stream, evenly from [low, high)."""
    return low + (high - low) * rng.random(count)


def truncated_normal(rng: np.random.Generator, count: int) -> np.ndarray:
    """The first `count` unit normals of a stream that lie within two sigma; 95% do, so a few rounds find them."""
    kept = np.empty(count)
    found = 0
    while found < count:
        drawn = rng.standard_normal(count - found)
        drawn = drawn[np.abs(drawn) <= 2.0]
        kept[found : found + drawn.size] = drawn
        found += drawn.size
    return kept


def uniform_of(rng: np.random.Generator, count: int, variance: float) -> np.ndarray:
    """The first `count` numbers of a stream, evenly around 0, with this variance."""
    limit = math.sqrt(3 * variance)
    return uniform(rng, count, -limit, limit)


def truncated_normal_of(rng: np.random.Generator, count: int, variance: float) -> np.ndarray:
    """The first `count` normals of a stream within two sigma, which have this variance once the others are left out."""
    return math.sqrt(variance) / _TRUNCATED_STDDEV * truncated_normal(rng, count)


def fans(shape: tuple[int, ...]) -> tuple[int, int]:
    """Inputs and outputs of one unit: of a kernel, its last two axes times the receptive field before them."""
    if len(shape) < 2:
        length = shape[0] if shape else 1
        return length, length
    receptive_field = math.prod(shape[:-2])
    return receptive_field * shape[-2], receptive_field * shape[-1]


def glorot_variance(shape: tuple[int, ...]) -> float:
    """Of Glorot and Bengio, "Understanding the difficulty of training deep feedforward neural networks" (2010)."""
    return 2 / sum(fans(shape))


def he_variance(shape: tuple[int, ...]) -> float:
    """Of He et al., "Delving deep into rectifiers" (ICCV 2015)."""
    return 2 / fans(shape)[0]
