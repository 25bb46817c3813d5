"""Arena of a shard: a flat run of values with its optimizer slots, and how updates change both."""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from shoal import initializers, optim
from shoal._memory.buffers import BufferPool
from shoal._wire import Aggregation, ArenaLayout, row_elements, storage_dtype
from shoal.variables import Variable
from shoal_server.optimizers import arrays, conversions, kernels, update_rules


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

    def apply(self, pushed: Sequence[np.ndarray], weights: Sequence[float], *, version: int, scale: float) -> None:
        """Applies one update: the gradient of one push, or the contributions to a step in order of rank.

        Args:
            pushed: flat arrays of the values' dtype and size; the first is overwritten.
            weights: weight of each array in the mean, > 0.
            version: updates applied before this one.
            scale: factor for the learning rate.
        """
        if self._rule is None:
            update_rules.aggregate(self.values, pushed, weights, self.layout.aggregation)
            return
        self._rule.apply(
            self.values,
            _weighted_mean(pushed, weights),
            self.slots,
            version=version,
            lr_scale=scale,
            decay_ranges=self._decay_ranges,
        )


def _weighted_mean(pushed: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Returns the weighted mean, summed in the given order, in the memory of the first array.

    Equal weights are divided out at the end, so that sums of small integers stay exact. Unequal ones are divided first,
    so that no weight, however large, overflows. The mean of finite numbers is finite, however large they are: a sum of
    equal weights is made of the numbers times a power of two, which changes no bit of the result unless it is below
    1e-38 times the number of arrays.
    """
    total = pushed[0]
    if len(pushed) == 1:
        return total
    if len(set(weights)) == 1:
        bits = (len(pushed) - 1).bit_length()
        share = math.ldexp(1.0, -bits)
        kernels.accumulate(total, pushed[1], share, both=True)
        for gradient in pushed[2:]:
            kernels.accumulate(total, gradient, share)
        if len(pushed) != 1 << bits:
            kernels.scale(total, math.ldexp(float(total.dtype.type(1.0 / len(pushed))), bits))
        return total
    largest = max(weights)
    relative = [weight / largest for weight in weights]
    shares = [weight / sum(relative) for weight in relative]
    kernels.scale(total, shares[0])
    for gradient, share in zip(pushed[1:], shares[1:], strict=True):
        kernels.accumulate(total, gradient, share)
    return total
