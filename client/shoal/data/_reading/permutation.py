"""A keyed permutation of the numbers from 0 to size - 1. It is computed by index, in constant memory."""

import hashlib
import math

import numpy as np

from shoal import errors
from shoal._numerics.random_streams import GOLDEN, splitmix64

MAX_SIZE = 2**63 - 1
# Up to this size the numbers are sorted by a keyed hash, which takes 32 KiB. A Feistel network over fewer numbers
# would need many more rounds until all permutations are equally likely.
_MAX_SORTED = 4096
# Statistical tests over 1,500 keys find no structure from 6 rounds on. 10 is the number of rounds of FF1, a standard
# for format-preserving encryption (NIST SP 800-38G).
ROUNDS = 10
_HALF = np.uint64(32)


class IndexPermutation:
    """A pseudorandom permutation of [0, size), the same on every machine and with every version of NumPy.

    It uses two constructions of Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. A small size
    uses the prefix cipher: the numbers in the order of their keyed hashes. A larger size uses the generalized Feistel
    cipher, which permutes the numbers below left * right. Here left is about the square root of the size, and the
    product is the smallest multiple of left that is not below the size. A result outside [0, size) goes through the
    cipher again until it is inside (cycle walking). Fewer than left numbers are outside. The hash is SplitMix64's
    finalizer.

    The permutation gives no secrecy: anyone can find the key.

    Args:
        size: how many numbers, from 0 to 2**63 - 1.
        seed: seed of the job, from 0 to 2**64 - 1.
        epoch: epoch, from 0 to 2**64 - 1.

    Raises:
        ProgramError: the size is out of range.
    """

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if not 0 <= size <= MAX_SIZE:
            raise errors.ProgramError(
                f"a data set has {size} samples; the order of an epoch is defined for 0 to {MAX_SIZE}"
            )
        self.size = size
        self._sorted: np.ndarray | None = None
        if size <= _MAX_SORTED:
            # The finalizer is a bijection, so no two hashes are equal.
            hashes = splitmix64(np.arange(size, dtype=np.uint64) * GOLDEN + _key(size, seed, epoch, 0))
            self._sorted = np.argsort(hashes, kind="stable").astype(np.int64)
            return
        root = math.isqrt(size - 1) + 1
        # An even number of rows or columns allows odd permutations. Otherwise each round would be an even one.
        left = root + root % 2
        self._left, self._right = np.uint64(left), np.uint64(-(-size // left))
        self._keys = [_key(size, seed, epoch, place) for place in range(ROUNDS)]

    def at(self, places: np.ndarray) -> np.ndarray:
        """Returns the numbers at some places of the permutation.

        Args:
            places: integers in [0, size), of shape [n].

        Returns:
            int64 [n].

        Raises:
            IndexError: a place is out of range.
        """
        if places.size and not 0 <= int(places.min()) <= int(places.max()) < self.size:
            raise IndexError(
                f"places {places.min()} to {places.max()} are not all within an order of {self.size} samples"
            )
        numbers: np.ndarray
        if self._sorted is not None:
            numbers = self._sorted[places]
            return numbers
        numbers = self._encipher(places.astype(np.uint64))
        outside = np.flatnonzero(numbers >= self.size)
        while outside.size:
            numbers[outside] = self._encipher(numbers[outside])
            outside = outside[numbers[outside] >= self.size]
        return numbers.astype(np.int64)

    def _encipher(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the numbers of the cipher over left * right numbers, uint64 [n]."""
        left: np.ndarray
        left, right = np.divmod(numbers, self._right)
        for place, key in enumerate(self._keys):
            if place % 2:
                _add(right, splitmix64(left + key), self._right)
            else:
                _add(left, splitmix64(right + key), self._left)
        left *= self._right
        left += right
        return left


def _add(numbers: np.ndarray, hashes: np.ndarray, modulus: np.uint64) -> None:
    """Adds hashes, scaled to [0, modulus), to numbers below the modulus, which is at most 2**32. Works in place.

    Source of the scaling: Lemire, "Fast random integer generation in an interval", ACM TOMACS 29 (2019).
    """
    hashes >>= _HALF
    hashes *= modulus
    hashes >>= _HALF
    numbers += hashes
    # Below the modulus, the difference is negative, which is a large number without a sign.
    np.minimum(numbers, numbers - modulus, out=numbers)


def _key(size: int, seed: int, epoch: int, place: int) -> np.uint64:
    """Returns the key of one round."""
    text = b"".join(number.to_bytes(8, "little") for number in (seed, epoch, size, place))
    return np.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8, person=b"shoal order").digest(), "little"))


__all__ = ["MAX_SIZE", "IndexPermutation"]
