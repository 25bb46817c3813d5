"""Trees of JAX, modules of Flax, and the arrays of NumPy that share their memory."""

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Alignment of arrays whose memory JAX can use on the CPU.
_ALIGNED = 64


def trained_part(model: Any) -> Any:
    """Returns what is trained: the parameters of a module of Flax (nnx), or the tree itself."""
    return nnx.state(model, nnx.Param) if (nnx := _nnx_of(model)) else model


def updated(model: Any, values: Any) -> Any:
    """Puts values into a module of Flax, and returns it; of another tree, it returns the values.

    Args:
        model: the module or the tree.
        values: a tree of arrays of NumPy, which nobody else changes.
    """
    arrays = jax.tree.map(to_jax, values)
    if nnx := _nnx_of(model):
        nnx.update(model, arrays)
        return model
    return arrays


def to_jax(array: np.ndarray) -> jax.Array:
    """Returns an array of JAX. On the CPU it shares the memory, if that is aligned."""
    if jax.default_backend() == "cpu" and array.nbytes and array.ctypes.data % _ALIGNED == 0:
        return jax.dlpack.from_dlpack(array)
    return jnp.asarray(array)


def _nnx_of(model: Any) -> Any:
    """Returns the library of a module of Flax; None for any other tree."""
    nnx = sys.modules.get("flax.nnx")
    return nnx if nnx and isinstance(model, nnx.Module) else None


__all__ = ["to_jax", "trained_part", "updated"]
