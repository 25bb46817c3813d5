"""Computing at once, on any backend."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras


def eagerly() -> AbstractContextManager[Any]:
    """Lets TensorFlow compute at once in the block, though Keras may build the model inside a function of it."""
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415 - only the backend in use is loaded

        return tf.init_scope()
    return nullcontext()


__all__ = ["eagerly"]
