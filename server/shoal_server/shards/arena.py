"""Arena of a shard: a flat array of values with its optimizer slots, and how updates change both."""

from collections.abc import Mapping, Sequence

import numpy as np

from shoal import initializers, optim
from shoal._memory.buffers import BufferPool
from shoal._wire import Aggregation, ArenaLayout, row_elements, storage_dtype
from shoal.variables import Variable
from shoal_server.optimizers import arrays, conversions, update_rules
from shoal_server.shards.running_sum import RunningSum, running_sum


class Arena:
    """Values and slots of one dtype and one rule, all flat arrays of the same length.

    Half-precision arenas keep float32 master values, which are cast when they are sent.

    Args:
        layout: the slices and their places.
        variables: the job's variables, by name. Initial values depend on the seed and the variable's name, not on the
            layout.
        optimizer: the job's optimizer; changes trainable arenas only.
        seed: the job's seed.
    """

    def __init__(
        self, layout: ArenaLayout, variables: Mapping[str, Variable], optimizer: optim.Optimizer, seed: int
    ) -> None:
        self.layout = layout
        dtype = storage_dtype(layout.dtype)
        self.values = arrays.full(layout.elements, 0, dtype)
        sizes = []
        for part in layout.slices:
            shape = variables[part.variable].shape
            start, stop = (row * row_elements(shape) for row in (part.row_start, part.row_stop))
            target = self.values[part.offset : part.offset + stop - start]
            initializers.fill(target, variables[part.variable].initializer, part.variable, shape, seed, start)
            sizes.append((part.variable, stop - start))
        self.slots: dict[str, np.ndarray] = {}
        self._rule: update_rules.UpdateRule | None = None
        self._sum: RunningSum | None = None  # of the open step; None if it has no contribution
        if layout.aggregation is Aggregation.TRAINABLE:
            self._rule = update_rules.rule_for(optimizer)
            self._decay_ranges = update_rules.decay_ranges_for(sizes, optimizer)
            self.slots = {
                name: arrays.full(layout.elements, self._rule.initial(name), dtype) for name in self._rule.slots
            }

    @property
    def nbytes(self) -> int:
        """Bytes of values and slots."""
        return self.values.nbytes + sum(slot.nbytes for slot in self.slots.values())

    @property
    def folded(self) -> bool:
        """Whether the running sum of the open step has a contribution."""
        return self._sum is not None

    def move(self, memory: BufferPool, *, slots: bool = False) -> None:
        """Continues with a copy of the values; readers keep the old arrays unchanged.

        Args:
            memory: provides the memory of the copy.
            slots: whether to copy the slots, too.
        """
        sources = [self.values, *(self.slots.values() if slots else ())]
        copies = [memory.take(source.nbytes).view(source.dtype) for source in sources]
        conversions.send_all([*zip(copies, sources, strict=True)])
        self.values = copies[0]
        if slots:
            self.slots = dict(zip(self.slots, copies[1:], strict=True))

    def assign(self, values: np.ndarray) -> None:
        """Overwrites the values; the slots stay."""
        np.copyto(self.values, values)

    def fold(self, array: np.ndarray, weight: float, expected: int) -> None:
        """Adds a contribution to the step's running sum. The values do not change.

        Args:
            array: flat array of the values' dtype and size; it may be overwritten.
            weight: weight of the array in the mean, > 0.
            expected: number of contributions to the step, as far as known.

        Raises:
            ValueError: the array has another dtype or size.
        """
        if array.shape != self.values.shape or array.dtype != self.values.dtype:
            raise ValueError(f"cannot add {array.dtype}{array.shape} to {self.values.dtype}{self.values.shape}")
        if self._sum is None:
            self._sum = running_sum(self.layout.aggregation, self.values)
        self._sum.add(array, weight, expected)

    def apply(
        self, pushed: Sequence[np.ndarray], weights: Sequence[float], *, version: int, scale: float, expected: int = 0
    ) -> None:
        """Applies one update: the gradient of one push, or the contributions to a step in order of rank.

        Args:
            pushed: the contributions that are not in the running sum yet; as for `fold`.
            weights: weight of each array in the mean, > 0.
            version: updates applied before this one.
            scale: factor for the learning rate.
            expected: number of contributions for which the running sum makes room; at least those in `pushed`.
        """
        for array, weight in zip(pushed, weights, strict=True):
            self.fold(array, weight, max(expected, len(pushed)))
        if self._sum is None:
            return
        result, self._sum = self._sum.take(self.values), None
        if self._rule is not None and result is not None:
            self._rule.apply(
                self.values, result, self.slots, version=version, lr_scale=scale, decay_ranges=self._decay_ranges
            )
