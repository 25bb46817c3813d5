"""Settings of the whole process: the dtype of new layers, and the seed of initial values and dropout."""

import secrets
import threading
from typing import Any

import numpy as np

from shoal import errors

_DTYPES = ("float32", "float64")
_lock = threading.Lock()  # guards _state
_state: dict[str, Any] = {
    "floatx": "float32",
    "seeds": None,  # draws them after `set_random_seed`
    "entropy": np.random.default_rng(secrets.randbits(64)),  # and before
}


def floatx() -> str:
    """Returns the dtype that new layers compute in and keep their variables in: "float32" unless it was changed."""
    return str(_state["floatx"])


def set_floatx(dtype: str) -> None:
    """Sets the dtype of layers that are made from now on.

    Args:
        dtype: "float32" or "float64".

    Raises:
        BadRequest: it is another one.
    """
    if dtype not in _DTYPES:
        raise errors.BadRequest(f"floatx is {dtype!r}; it must be one of {', '.join(_DTYPES)}")
    _state["floatx"] = dtype


def set_random_seed(seed: int) -> None:
    """Makes the initial values, dropout and shuffling of what is made from now on the same in each run.

    Args:
        seed: 0 to 2**64 - 1.
    """
    with _lock:
        _state["seeds"] = np.random.default_rng(seed)


def next_seed() -> int:
    """Returns a new seed, from 1 to 2**63 - 1. Without `set_random_seed`, it differs in each process."""
    with _lock:
        return int((_state["seeds"] or _state["entropy"]).integers(1, 2**63))


def shuffle_seed(*, together: bool) -> int:
    """Returns a seed of the order of samples.

    Args:
        together: whether other processes need the same seed. They have it if all or none called `set_random_seed`.
    """
    return 0 if together and _state["seeds"] is None else next_seed()


__all__ = ["floatx", "next_seed", "set_floatx", "set_random_seed", "shuffle_seed"]
