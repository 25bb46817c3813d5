"""Trees of JAX, modules of Flax, and the arrays of NumPy that share their memory."""

import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shoal import errors

# Alignment of arrays whose memory JAX can use on the CPU.
_ALIGNED = 64


def trained_part(model: Any, wrt: Any = None) -> Any:
    """Returns what is trained: the parameters of a module of Flax (nnx), or the tree itself.

    Args:
        model: the module or the tree.
        wrt: a filter of nnx for the variables of a module. None means all parameters.

    Raises:
        InvalidVariable: the tree has more than parameters, or is no module and has a filter.
    """
    if nnx := _nnx_of(model):
        return nnx.state(model, nnx.Param if wrt is None else wrt)
    if wrt is not None:
        raise errors.InvalidVariable("wrt is a filter for a module of Flax (nnx); of a tree, give only what is trained")
    if isinstance(model, Mapping) and "params" in model and len(model) > 1:
        others = ", ".join(repr(it) for it in model if it != "params")
        raise errors.InvalidVariable(
            f"the tree has {others} beside 'params', and everything in a tree is trained; give variables['params']"
        )
    if hasattr(model, "params") and hasattr(model, "opt_state"):
        raise errors.InvalidVariable(
            f"the tree is a {type(model).__name__}, and everything in a tree is trained; give its params"
        )
    return model


def updated(model: Any, values: Any, wrt: Any = None) -> Any:
    """Puts values into a module of Flax, and returns it; of another tree, it returns the values.

    Args:
        model: the module or the tree. Its arrays have the shardings of the new ones.
        values: a tree of arrays of NumPy, which nobody else changes.
        wrt: see `trained_part`.
    """
    arrays = jax.tree.map(to_jax, values, trained_part(model, wrt))
    if nnx := _nnx_of(model):
        nnx.update(model, arrays)
        return model
    return arrays


def to_jax(array: np.ndarray, like: Any = None) -> jax.Array:
    """Returns an array of JAX. On one CPU it shares the memory, if that is aligned.

    Args:
        array: the array.
        like: an array of JAX whose sharding the result has.
    """
    if isinstance(like, jax.Array) and not isinstance(like.sharding, jax.sharding.SingleDeviceSharding):
        return jax.device_put(array, like.sharding)
    if jax.default_backend() != "cpu" or not array.nbytes or array.ctypes.data % _ALIGNED:
        return jnp.asarray(array)
    if array.dtype == jnp.bfloat16:  # DLPack of NumPy does not have it
        return jax.lax.bitcast_convert_type(jax.dlpack.from_dlpack(array.view(np.uint16)), jnp.bfloat16)
    return jax.dlpack.from_dlpack(array)


def _nnx_of(model: Any) -> Any:
    """Returns the library of a module of Flax; None for any other tree."""
    nnx = sys.modules.get("flax.nnx")
    return nnx if nnx and isinstance(model, nnx.Module) else None


__all__ = ["to_jax", "trained_part", "updated"]
