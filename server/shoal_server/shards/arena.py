"""One arena of a shard: a flat run of values, the optimizer's slots beside it, and how updates change both."""

from collections.abc import Mapping, Sequence

import numpy as np

from shoal import initializers, optim
from shoal._memory.buffers import BufferPool
from shoal._wire import Aggregation, ArenaLayout, row_elements, storage_dtype
from shoal.variables import Variable
from shoal_server.optimizers import arrays, conversions, kernels, update_rules


class Arena:
    """Values and slots of one dtype and one rule, all flat arrays of the same length.

    Half-precision arenas keep float32 master values, which are cast as they are sent.

    Args:
        layout: what lies where.
        variables: the job's, with the initializers; values depend on the seed and the variable's name, not on the
            layout.
        optimizer: of the job; changes trainable arenas only.
        seed: of the job.
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
            self._segments = update_rules.decay_ranges_for(sizes, optimizer)
            self.slots = {
                name: arrays.full(layout.elements, self._rule.initial(name), dtype) for name in self._rule.slots
            }

    @property
    def nbytes(self) -> int:
        """Bytes of values and slots."""
        return self.values.nbytes + sum(slot.nbytes for slot in self.slots.values())

    def move(self, memory: BufferPool, *, slots: bool = False) -> None:
        """Goes on with a copy of the values; those that there were stay as they are.

        Args:
            memory: for the copy.
            slots: the same with them.
        """
        sources = [self.values, *(self.slots.values() if slots else ())]
        copies = [memory.take(source.nbytes).view(source.dtype) for source in sources]
        conversions.send_all([*zip(copies, sources, strict=True)])
        self.values = copies[0]
        if slots:
            self.slots = dict(zip(self.slots, copies[1:], strict=True))

    def assign(self, values: np.ndarray) -> None:
        """Overwrites the values; slots stay."""
        np.copyto(self.values, values)

    def apply(self, pushed: Sequence[np.ndarray], weights: Sequence[float], *, version: int, scale: float) -> None:
        """Applies one update: what one push brought, or the contributions to a step in order of rank.

        Args:
            pushed: of the values' own dtype; the first is overwritten.
            weights: of each in the mean, > 0.
            version: updates applied before this one.
            scale: of the learning rate.
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
            segments=self._segments,
        )


def _weighted_mean(pushed: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """The mean, added up in the order given; the first array takes it.

    Equal weights are divided out at the end, so that sums of small integers stay exact. Others are divided before, so
    that no weight, however large, overflows.
    """
    total = pushed[0]
    if len(pushed) == 1:
        return total
    if len(set(weights)) == 1:
        for gradient in pushed[1:]:
            kernels.accumulate(total, gradient, 1.0)
        kernels.scale(total, 1.0 / len(pushed))
        return total
    largest = max(weights)
    relative = [weight / largest for weight in weights]
    shares = [weight / sum(relative) for weight in relative]
    kernels.scale(total, shares[0])
    for gradient, share in zip(pushed[1:], shares[1:], strict=True):
        kernels.accumulate(total, gradient, share)
    return total
