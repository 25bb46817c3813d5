"""Helpers by Keras' names."""

from typing import Any

import numpy as np

from shoal_distribute.keras.config import set_random_seed
from shoal_distribute.keras.names import forget_names
from shoal_distribute.keras.saving import register_keras_serializable


def to_categorical(x: Any, num_classes: int | None = None) -> np.ndarray:
    """Returns class numbers as one-hot vectors.

    Args:
        x: class numbers, [...] or [..., 1].
        num_classes: length of a vector; None means the largest number plus 1.
    """
    numbers = np.asarray(x, np.int64)
    if numbers.ndim > 1 and numbers.shape[-1] == 1:
        numbers = numbers[..., 0]
    return np.eye(num_classes or int(numbers.max()) + 1)[numbers]


def clear_session() -> None:
    """Starts the numbers in names of layers again."""
    forget_names()


__all__ = ["clear_session", "register_keras_serializable", "set_random_seed", "to_categorical"]
