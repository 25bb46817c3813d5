"""Sequential models: layers one after the other."""

from collections.abc import Sequence
from typing import Any

from shoal import errors
from shoal_distribute.keras.layers.base import KerasTensor, Layer, Shape
from shoal_distribute.keras.layers.input import InputLayer
from shoal_distribute.keras.models.model import Model


class Sequential(Model):
    """Model of layers one after the other.

    It is built when the shape of a sample is known: from an `Input` or an `input_shape` in front, or from the first
    batch.

    Args:
        layers: the layers. An `Input` may come first.
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: something is no layer, or two layers have the same name.
    """

    def __init__(self, layers: Sequence[Any] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._listed: list[Layer] = []
        for layer in layers or []:
            self.add(layer)

    @property
    def layers(self) -> list[Layer]:
        return list(self._listed)

    def add(self, layer: Any) -> None:
        """Appends a layer.

        Args:
            layer: the layer, or what `Input` returned.

        Raises:
            InvalidLayer: it is no layer, or the name is taken.
        """
        if isinstance(layer, KerasTensor) and layer.call is None:
            self.sample_shape = layer.sample_shape
            return
        if isinstance(layer, InputLayer):
            self.sample_shape = layer.sample_shape
            return
        if not isinstance(layer, Layer):
            raise errors.InvalidLayer(f"Sequential got {layer!r}; give objects of keras.layers", kind="Sequential")
        if not self._listed and self.sample_shape is None:
            self.sample_shape = layer.sample_shape
        self._listed.append(layer)
        self._check_names()
        self.built = False
        if self.sample_shape is not None:
            self.build(self.sample_shape)

    def pop(self) -> Layer:
        """Removes the last layer, and returns it.

        Raises:
            InvalidLayer: there is none.
        """
        if not self._listed:
            raise errors.InvalidLayer(f"model {self.name} has no layer to remove", kind="Sequential")
        removed = self._listed.pop()
        if self.sample_shape is not None:
            self.build(self.sample_shape)
        return removed

    def build(self, shape: Any) -> None:
        given = tuple(shape)
        if given and given[0] is None:  # Keras' shapes have the batch in front
            given = given[1:]
        self.sample_shape = given
        symbol = self._inputs  # the same one after `add`, so that `layer.output` stays connected with it
        if symbol is None or symbol.sample_shape != given:
            symbol = self._inputs = KerasTensor(given, self.dtype, None, f"{self.name}_input")
        for layer in self._listed:
            symbol = layer(symbol)
        self._outputs = symbol
        self.built = True

    def compute_output_shape(self, shape: Shape) -> Any:
        for layer in self._listed:
            shape = layer.compute_output_shape(shape)
        return shape

    def call(self, inputs: Any, training: bool = False) -> Any:
        for layer in self._listed:
            inputs = layer(inputs, training=training)
        return inputs


__all__ = ["Sequential"]
