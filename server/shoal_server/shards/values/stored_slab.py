"""Stored slab: the values of a slab with their optimizer slots, and how updates change both."""

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from shoal import initializers, optim
from shoal._memory.buffers import BufferPool
from shoal._wire import Aggregation, Slab, Slice, row_elements, storage_dtype
from shoal.variables import Variable
from shoal_server.optimizers import arrays, conversions, norms, update_rules
from shoal_server.shards.values.running_sum import RunningSum, running_sum
from shoal_server.shards.values.snapshot import Snapshot


def stored_bytes(slab: Slab, optimizer: optim.Optimizer) -> int:
    """Returns the bytes that the values and slots of a slab will take."""
    slots = update_rules.rule_for(optimizer).slots if slab.aggregation is Aggregation.TRAINABLE else ()
    return slab.elements * storage_dtype(slab.dtype).itemsize * (1 + len(slots))


class StoredSlab:
    """Values and slots of one dtype and one rule, all flat arrays of the same length. The lock of the group guards it.

    Half-precision slabs keep float32 master values, which are cast when they are sent.

    Args:
        slab: the slab.
        variables: the job's variables, by name. Initial values depend on the seed and the variable's name, not on the
            layout.
        optimizer: the job's optimizer; changes trainable slabs only.
        seed: the job's seed.
        counting: guards the numbers of readers of the snapshots; the slabs of a group share it.
        fills: whether the values get their initial values.

    Attributes:
        slab: as given.
        values: the values.
        slots: the slots, by name.
    """

    def __init__(
        self,
        slab: Slab,
        variables: Mapping[str, Variable],
        optimizer: optim.Optimizer,
        seed: int,
        counting: threading.Lock,
        *,
        fills: bool = True,
    ) -> None:
        self.slab = slab
        dtype = storage_dtype(slab.dtype)
        self.values = arrays.full(slab.elements, 0, dtype)
        sizes = []
        for part, first in _slices(slab):
            shape = variables[part.variable].shape
            start, stop = (row * row_elements(shape) for row in (part.row_start, part.row_stop))
            target = self.values[first : first + stop - start]
            if fills:
                initializers.fill(target, variables[part.variable].initializer, part.variable, shape, seed, start)
            sizes.append((part.variable, stop - start))
        self.slots: dict[str, np.ndarray] = {}
        self._rule: update_rules.UpdateRule | None = None
        self._sum: RunningSum | None = None  # of the open step; None if it has no contribution
        self._mean: np.ndarray | None = None  # its result, from `measure` until the update
        if slab.aggregation is Aggregation.TRAINABLE:
            self._rule = update_rules.rule_for(optimizer)
            self._setting_ranges = update_rules.setting_ranges_for(sizes, optimizer)
            if optimizer.clip_norm:
                self._slice_bounds = np.cumsum([0, *(elements for _, elements in sizes)], dtype=np.int64)
                self._slice_rates = np.array([optimizer.settings_of(name).rate for name, _ in sizes], np.float64)
            self.slots = {
                name: arrays.full(slab.elements, self._rule.initial(name), dtype) for name in self._rule.slots
            }
        self._counting = counting
        # Of the current values, once a reader has asked for it.
        self._snapshot: Snapshot | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of values and slots."""
        return self.values.nbytes + sum(slot.nbytes for slot in self.slots.values())

    def array(self, slot: str) -> np.ndarray:
        """Returns a slot, or the values for "" and if this slab has no slots."""
        return self.slots[slot] if slot and self.slots else self.values

    @property
    def folded(self) -> bool:
        """Whether the open step has a contribution that was folded."""
        return self._sum is not None or self._mean is not None

    def copy_from(self, parts: Iterable[tuple["StoredSlab", int, int]]) -> None:
        """Fills the values and slots with elements of other slabs, one part after the other.

        Args:
            parts: each slab, with its first element and the one after its last.
        """
        first = 0
        for source, start, stop in parts:
            target = slice(first, first + stop - start)
            self.values[target] = source.values[start:stop]
            for name, slot in self.slots.items():
                slot[target] = source.slots[name][start:stop]
            first = target.stop

    def latest(self, version: int) -> Snapshot:
        """Returns the snapshot of the current values. The caller begins to use it before it releases the lock.

        Args:
            version: number of updates in the values.
        """
        if self._snapshot is None:
            self._snapshot = Snapshot(version, self.values, self.slots, self._counting)
        return self._snapshot

    def leave_to_readers(self, memory: BufferPool) -> None:
        """Moves to new memory if readers use the current one. Called before the values change."""
        snapshot, self._snapshot = self._snapshot, None
        if snapshot and snapshot.in_use:
            self._move(memory, slots=snapshot.being_saved)

    def _move(self, memory: BufferPool, *, slots: bool) -> None:
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
            self._sum = running_sum(self.slab.aggregation, self.values)
        self._sum.add(array, weight, expected)

    def apply(
        self,
        pushed: Sequence[np.ndarray],
        weights: Sequence[float],
        *,
        version: int,
        scale: float,
        expected: int = 0,
        learning_rate: optim.Schedule | None = None,
    ) -> None:
        """Applies one update: the gradient of one push, or the contributions to a step in order of rank.

        Args:
            pushed: the contributions that are not in the running sum yet; as for `fold`.
            weights: weight of each array in the mean, > 0.
            version: updates applied before this one.
            scale: factor for the learning rate.
            expected: number of contributions for which the running sum makes room; at least those in `pushed`.
            learning_rate: replaces the optimizer's schedule; None keeps it.
        """
        gradient = self.combine(pushed, weights, expected)
        if gradient is not None:
            self.update(gradient, version=version, scale=scale, learning_rate=learning_rate)

    def combine(self, pushed: Sequence[np.ndarray], weights: Sequence[float], expected: int = 0) -> np.ndarray | None:
        """Ends the running sum of the open step.

        Args:
            pushed, weights, expected: as for `apply`.

        Returns:
            The gradient, for `update`. It may be changed. None if the values need no gradient; they have changed then.
        """
        if self._mean is not None:
            mean, self._mean = self._mean, None
            return mean
        for array, weight in zip(pushed, weights, strict=True):
            self.fold(array, weight, max(expected, len(pushed)))
        if self._sum is None:
            return None
        result, self._sum = self._sum.take(self.values), None
        return result if self._rule is not None else None

    def measure(self) -> Sequence[float]:
        """Ends the running sum of trainable values, and returns the squares of its result. `combine` then returns it.

        Returns:
            As `squares`; empty if there is no sum, or if the values are not trainable.
        """
        if self._rule is None or self._sum is None:
            return ()
        self._mean = self.combine((), ())
        return () if self._mean is None else self.squares(self._mean)

    def squares(self, gradient: np.ndarray) -> Sequence[float]:
        """Returns the sum of the squares of each slice of a gradient, 0 for a frozen variable."""
        squares: list[float] = norms.squares_of(gradient, self._slice_bounds, self._slice_rates).tolist()
        return squares

    def update(
        self, gradient: np.ndarray, *, version: int, scale: float, learning_rate: optim.Schedule | None = None
    ) -> None:
        """Applies the optimizer to a gradient.

        Args:
            gradient: the result of `combine`; not changed.
            version, scale, learning_rate: as for `apply`.
        """
        if self._rule is not None:
            self._rule.apply(
                self.values,
                gradient,
                self.slots,
                version=version,
                lr_scale=scale,
                setting_ranges=self._setting_ranges,
                learning_rate=learning_rate,
            )


def _slices(slab: Slab) -> Iterator[tuple[Slice, int]]:
    """Yields the slices of a slab's arenas, each with its first element in the slab."""
    for arena, first in zip(slab.arenas, slab.starts, strict=True):
        for part in arena.slices:
            yield part, first + part.offset


__all__ = ["StoredSlab", "stored_bytes"]
