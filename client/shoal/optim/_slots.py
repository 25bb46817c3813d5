"""Slots: the state that an optimizer keeps for each value, by name."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Slot:
    """A state array beside the values of each trainable variable, in their shape and dtype (float32 for halves).

    Attributes:
        name: its name, in checkpoints and in `OptimizerState`. It is never used with another meaning.
        letter: what it is in the equations of the optimizer.
        only_with: the argument of the optimizer that must be on, or above 0, for the slot to exist; "" means always.
        initial: the argument of the optimizer that has the value before the first update; "" means 0.
        least: the smallest value that an element can have.
    """

    name: str
    letter: str
    only_with: str = ""
    initial: str = ""
    least: float = -math.inf


__all__ = ["Slot"]
