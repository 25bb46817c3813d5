"""Layers that merge several inputs into one output."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from shoal import errors
from shoal.program import Array
from shoal_distribute.keras.layers.base import Layer, Shape, cast
from shoal_distribute.keras.tensor import Tensor, recorded
from shoal_worker.arrays import namespace_of

# The merged array, and the function from its gradient to those of the inputs.
Merged = tuple[Array, Callable[[Array], Sequence[Array]]]


class _Merging(Layer):
    """Base class of layers that are called on a list of at least two tensors."""

    def compute_output_shape(self, shape: Any) -> Shape:
        if not isinstance(shape, list) or len(shape) < 2:
            kind = type(self).__name__
            raise errors.InvalidLayer(
                f"layer {self.name} needs a list of at least two inputs, such as {kind}()([x, y])", kind=kind
            )
        return self._merged_shape(shape)

    def call(self, inputs: Any, training: bool = False) -> Tensor:  # noqa: ARG002 - acts the same
        self.compute_output_shape([it.shape[1:] for it in inputs] if isinstance(inputs, list) else None)
        tensors = [cast(it, self.dtype) for it in inputs]
        y, pull = self._merge([it.array for it in tensors])
        return recorded(y, tensors, pull)

    def _merged_shape(self, shapes: list[Shape]) -> Shape:
        if len(set(shapes)) != 1:
            raise self._mismatch(shapes, "the same shape")
        return shapes[0]

    def _mismatch(self, shapes: list[Shape], wants: str) -> errors.InvalidShape:
        found = ", ".join(map(str, shapes))
        return errors.InvalidShape(f"layer {self.name} got inputs of the shapes {found}; give {wants}")

    @abstractmethod
    def _merge(self, arrays: list[Array]) -> Merged:
        """Returns the merged array and its pullback."""
        raise NotImplementedError


class Add(_Merging):
    """Sum of the inputs."""

    def _merge(self, arrays: list[Array]) -> Merged:
        return sum(arrays[1:], arrays[0]), lambda dy: [dy for _ in arrays]


class Average(_Merging):
    """Mean of the inputs."""

    def _merge(self, arrays: list[Array]) -> Merged:
        count = len(arrays)
        return sum(arrays[1:], arrays[0]) / count, lambda dy: [dy / count for _ in arrays]


class Subtract(_Merging):
    """Difference of two inputs."""

    def _merged_shape(self, shapes: list[Shape]) -> Shape:
        if len(shapes) != 2:
            raise self._mismatch(shapes, "two inputs")
        return super()._merged_shape(shapes)

    def _merge(self, arrays: list[Array]) -> Merged:
        return arrays[0] - arrays[1], lambda dy: [dy, -dy]


class Multiply(_Merging):
    """Product of the inputs."""

    def _merge(self, arrays: list[Array]) -> Merged:
        def pull(dy: Array) -> list[Array]:
            return [_product([dy, *arrays[:number], *arrays[number + 1 :]]) for number in range(len(arrays))]

        return _product(arrays), pull


class Maximum(_Merging):
    """Largest of the inputs at each element. The first of equal ones gets the gradient."""

    def _merge(self, arrays: list[Array]) -> Merged:
        stacked = namespace_of(arrays[0]).stack(arrays)
        which = stacked.argmax(axis=0)
        return stacked.max(axis=0), lambda dy: [dy * (which == number) for number in range(len(arrays))]


class Concatenate(_Merging):
    """Concatenation along one axis; the others must be equal.

    Args:
        axis: the axis, counted with the batch, whose axis it cannot be.
        **kwargs: see `Layer`.
    """

    def __init__(self, axis: int = -1, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._axis = axis

    def _merged_shape(self, shapes: list[Shape]) -> Shape:
        axis = self._sample_axis(len(shapes[0]))
        others = {(*shape[:axis], *shape[axis + 1 :]) for shape in shapes}
        if not 0 <= axis < len(shapes[0]) or len(others) != 1:
            raise self._mismatch(shapes, f"shapes that differ in axis {self._axis} alone")
        return *shapes[0][:axis], sum(shape[axis] for shape in shapes), *shapes[0][axis + 1 :]

    def _merge(self, arrays: list[Array]) -> Merged:
        xp, axis = namespace_of(arrays[0]), 1 + self._sample_axis(arrays[0].ndim - 1)
        ends = [sum(it.shape[axis] for it in arrays[: number + 1]) for number in range(len(arrays) - 1)]
        return xp.concatenate(arrays, axis), lambda dy: xp.split(dy, ends, axis)

    def _sample_axis(self, axes: int) -> int:
        return self._axis + axes if self._axis < 0 else self._axis - 1


def _product(factors: list[Array]) -> Array:
    found = factors[0]
    for factor in factors[1:]:
        found = found * factor
    return found


__all__ = ["Add", "Average", "Concatenate", "Maximum", "Multiply", "Subtract"]
