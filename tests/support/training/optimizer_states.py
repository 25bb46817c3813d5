"""Comparison of states of optimizers."""

from collections.abc import Mapping

import numpy as np

from shoal.optim import OptimizerState


def same_arrays(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    """Returns whether arrays have the same names and bits."""
    return one.keys() == other.keys() and all(np.array_equal(it, other[name]) for name, it in one.items())


def same_state(one: OptimizerState, other: OptimizerState) -> bool:
    """Returns whether two states have the same updates, slots and bits."""
    slots = one.slots.keys() == other.slots.keys()
    return (
        slots and one.updates == other.updates and all(same_arrays(it, other.slots[k]) for k, it in one.slots.items())
    )
