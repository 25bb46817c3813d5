"""Random numbers that depend on a seed, a name and a place alone, and the spreads that initializers give them."""

import hashlib
import math

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
