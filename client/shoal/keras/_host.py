"""Computing on the host, on any backend, also from a step that the backend compiles."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from shoal import errors


def eagerly() -> AbstractContextManager[Any]:
    """Lets TensorFlow compute at once in the block, though Keras may build the model inside a function of it."""
    if keras.config.backend() == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415 - only the backend in use is loaded

        return tf.init_scope()
    return nullcontext()


def call_on_host(
    function: Callable[..., Sequence[np.ndarray]], operands: Sequence[Any], like: Sequence[Any]
) -> Sequence[Any]:
    """Calls a function in each step, in the order of the steps, also if the step is compiled.

    Args:
        function: called with arrays. It returns arrays of the shapes and dtypes of `like`.
        operands: tensors of the backend, for the function. Sparse ones of TensorFlow become dense.
        like: variables or tensors.

    Returns:
        What the function returned: tensors of the backend, or arrays.

    Raises:
        BadRequest: XLA of TensorFlow compiles the step, which cannot call the host.
    """
    backend = keras.config.backend()
    if backend == "jax":
        import jax  # noqa: PLC0415
        from jax.experimental import io_callback  # noqa: PLC0415

        shapes = tuple(jax.ShapeDtypeStruct(it.shape, it.dtype) for it in like)
        return io_callback(lambda *given: tuple(function(*map(np.asarray, given))), shapes, *operands, ordered=True)
    if backend == "tensorflow":
        import tensorflow as tf  # noqa: PLC0415
        from tensorflow.python.ops import control_flow_util  # noqa: PLC0415 - nothing public tells it

        if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise errors.BadRequest(
                "XLA of TensorFlow compiles the step, and cannot call the host for the push and the pull; give "
                "jit_compile=False to model.compile, whose default on GPUs is XLA"
            )

        def with_arrays(*given: Any) -> Sequence[np.ndarray]:
            return function(*(it.numpy() for it in given))

        found = tf.py_function(with_arrays, [tf.convert_to_tensor(it) for it in operands], [it.dtype for it in like])
        return [tf.ensure_shape(value, it.shape) for value, it in zip(found, like, strict=True)]
    return function(*map(keras.ops.convert_to_numpy, operands))


__all__ = ["call_on_host", "eagerly"]
