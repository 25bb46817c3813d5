"""Decoding of pulled slabs into arrays by name."""

import math

import numpy as np

from shoal._wire.framing import SlabRange, copy_elements
from shoal._wire.packing import Memory, Packer
from shoal._wire.plans import PlannedSlice
from shoal._wire.slabs import Slab

# Minimum size of a slab with a partial variable that is received slice by slice, so that it is in memory only once.
SCATTERED_BYTES = 64 << 20


class PullDecoder:
    """Receives the variables of one pull.

    A slab is received into flat memory, and whole variables are views of it. Slices of split variables are copied
    from there or, in large slabs, received directly into their variable.

    Several threads may use it at once, each for the slabs of another server.

    Args:
        packer: packer of the placement.
        memory: allocates the memory of the values.
    """

    def __init__(self, packer: Packer, memory: Memory) -> None:
        self._packer, self._memory = packer, memory
        self._values = packer.nothing.copy()
        self._values |= {name: self._array(name) for name in packer.split}
        self._flat: dict[Slab, np.ndarray] = {}
        self._expected: dict[Slab, np.ndarray] = {}  # slabs whose variables are already in _values

    def runs(self, slab: Slab) -> list[SlabRange]:
        """Returns the memory of a slab, which must be filled before `values` is called."""
        plan = self._packer.plan(slab)
        if slab.nbytes >= SCATTERED_BYTES and plan.partial:
            return [SlabRange(it.start, it.stop, self._target(it).reshape(-1)) for it in plan.parts]
        self._flat[slab] = flat = self._memory(slab.elements * slab.dtype.itemsize).view(slab.dtype)
        return [SlabRange(0, slab.elements, flat)]

    def expect(self, slab: Slab, elements: np.ndarray) -> None:
        """Prepares to adopt these elements before they arrive: with many variables that takes a while."""
        plan = self._packer.plan(slab)
        if plan.travels_as_it_is:
            self._values.update(plan.whole(elements))
            self._expected[slab] = elements

    def forget(self) -> None:
        """Drops the memory that was passed to `expect`, because its values will not arrive."""
        for slab in self._expected:
            self._values.update(dict.fromkeys(self._packer.plan(slab).names))
        self._expected = {}

    def adopt(self, slab: Slab, elements: np.ndarray) -> None:
        """Takes a slab that lies in memory in its wire dtype. The values may then be views of it."""
        if self._packer.plan(slab).travels_as_it_is:
            self._flat[slab] = elements
            return
        for run in self.runs(slab):
            copy_elements(run.target, elements[run.start : run.stop])

    def values(self) -> dict[str, np.ndarray]:
        """Returns the variables by name, in the placement's order. Call it once all slabs have arrived."""
        values = self._values
        for slab, elements in self._flat.items():
            plan = self._packer.plan(slab)
            if self._expected.get(slab) is not elements:
                values.update(plan.whole(elements))
            for part in plan.partial:
                values[part.variable][part.rows] = elements[part.elements].reshape(part.shape)
        return values

    def _target(self, part: PlannedSlice) -> np.ndarray:
        if part.rows is None:
            self._values[part.variable] = self._array(part.variable)
        array: np.ndarray = self._values[part.variable]
        return array if part.rows is None else array[part.rows]

    def _array(self, name: str) -> np.ndarray:
        variable = self._packer.variables[name]
        nbytes = math.prod(variable.shape) * variable.dtype.itemsize
        return self._memory(nbytes).view(variable.dtype).reshape(variable.shape)


__all__ = ["PullDecoder"]
