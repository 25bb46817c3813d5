"""Inputs of models."""

from collections.abc import Sequence
from typing import Any, ClassVar

from shoal import errors
from shoal_distribute.keras.layers.base import KerasTensor, Layer, Shape


def Input(  # noqa: N802 - Keras' name
    shape: Sequence[int | None] | None = None,
    batch_size: int | None = None,
    dtype: str | None = None,
    *,
    name: str | None = None,
) -> KerasTensor:
    """Returns the symbolic tensor that a model begins with.

    Args:
        shape: shape of a sample.
        batch_size: accepted for Keras' sake, and ignored: batches may have any length.
        dtype: dtype of the samples. None means `keras.config.floatx()`.
        name: name of the input.

    Raises:
        InvalidLayer: the shape is missing, or has an unknown length.
    """
    del batch_size
    if not isinstance(shape, list | tuple) or any(length is None or length < 0 for length in shape):
        raise errors.InvalidLayer(
            f"Input got the shape {shape!r}; give the lengths of a sample's axes, such as (32, 32, 3)", kind="Input"
        )
    layer = InputLayer(tuple(int(length or 0) for length in shape), name=name, dtype=dtype)
    return layer.symbol


class InputLayer(Layer):
    """First layer of a model: it says the shape of a sample. `Input` makes it.

    Args:
        shape: shape of a sample.
        batch_size: accepted for Keras' sake, and ignored: batches may have any length.
        **kwargs: see `Layer`.
    """

    refused: ClassVar = {
        **dict.fromkeys(("sparse", "ragged"), (None, "arrays are dense")),
        "batch_shape": (None, "give shape, the shape of a sample"),
        "input_tensor": (None, "give shape, the shape of a sample"),
        "optional": (False, "a model needs all its inputs"),
    }

    def __init__(self, shape: Sequence[int], batch_size: int | None = None, **kwargs: Any) -> None:
        del batch_size
        super().__init__(**kwargs)
        self.shape = self.sample_shape = tuple(shape)
        self.built = True
        self.symbol = KerasTensor(self.shape, self.dtype, None, self.name, self)
        self._symbols = self.symbol, self.symbol

    def compute_output_shape(self, shape: Shape) -> Shape:
        return shape

    def call(self, inputs: Any, training: bool = False) -> Any:  # noqa: ARG002 - acts the same
        return inputs


__all__ = ["Input", "InputLayer"]
