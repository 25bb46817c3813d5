"""Layers of single values: dense layers, embeddings, dropout, and changes of shape, size or scale."""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import numpy as np

import shoal_nn
from shoal import errors
from shoal_distribute.keras import activations
from shoal_distribute.keras.layers.core_layer import CoreLayer, WeightArguments
from shoal_distribute.keras.names import Refused
from shoal_distribute.keras.tensor import Tensor

# Arguments of Keras for adapters of low rank, and for weights of few bits.
LOW_RANK: Refused = {
    "lora_rank": (None, "there are no adapters of low rank"),
    "lora_alpha": (None, "there are no adapters of low rank"),
    "quantization_config": (None, "weights are not quantized"),
}


class ActivatedLayer(CoreLayer):
    """Base class of layers with a kernel, a bias and an activation.

    Args:
        activation: name or function of the activation; None means none.
        kernel: the arguments for the kernel.
        bias: the arguments for the bias.
        **kwargs: see `Layer`.
    """

    def __init__(self, activation: Any, kernel: WeightArguments, bias: WeightArguments, /, **kwargs: Any) -> None:
        super().__init__({"kernel": kernel, "bias": bias}, **kwargs)
        self._activation = activations.layer_of(activation)

    def activated(self) -> shoal_nn.Layer | None:
        return self._activation


class Dense(ActivatedLayer):
    """Fully connected layer over the last axis: activation(x @ kernel + bias).

    Args:
        units: length of the output's last axis.
        activation: name or function of the activation; None means none.
        use_bias: whether to add a bias.
        kernel_initializer: name or object.
        bias_initializer: name or object.
        kernel_regularizer: name, object or function; None means none.
        bias_regularizer: as `kernel_regularizer`.
        activity_regularizer: see `Layer`.
        kernel_constraint: name, object or function; None means none.
        bias_constraint: as `kernel_constraint`.
        **kwargs: see `Layer`.
    """

    refused: ClassVar[Refused] = LOW_RANK

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        kernel_regularizer: Any = None,
        bias_regularizer: Any = None,
        activity_regularizer: Any = None,
        kernel_constraint: Any = None,
        bias_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        kernel = WeightArguments(kernel_initializer, kernel_regularizer, kernel_constraint)
        bias = WeightArguments(bias_initializer, bias_regularizer, bias_constraint)
        super().__init__(activation, kernel, bias, activity_regularizer=activity_regularizer, **kwargs)
        self._layer = shoal_nn.Dense(units, bias=use_bias)

    def core(self) -> shoal_nn.Layer:
        return self._layer


class Embedding(CoreLayer):
    """Table of vectors: the row of each integer.

    Args:
        input_dim: number of rows.
        output_dim: length of a vector.
        embeddings_initializer: name or object.
        embeddings_regularizer: name, object or function; None means none.
        embeddings_constraint: as `embeddings_regularizer`.
        **kwargs: see `Layer`.
    """

    weight_names: ClassVar = {"table": "embeddings"}
    takes_integers = True
    refused: ClassVar[Refused] = {
        **LOW_RANK,
        "mask_zero": (False, "layers know no masks; give the padding a sample_weight of 0, or slice it off"),
        "weights": (None, "call set_weights when the layer is built"),
    }

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        embeddings_constraint: Any = None,
        **kwargs: Any,
    ) -> None:
        table = WeightArguments(embeddings_initializer, embeddings_regularizer, embeddings_constraint)
        super().__init__({"table": table}, **kwargs)
        self._layer = shoal_nn.Embedding(input_dim, output_dim)

    def core(self) -> shoal_nn.Layer:
        return self._layer

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:
        whole = inputs if inputs.array.dtype.kind in "iu" else Tensor(inputs.array.astype(np.int32))
        return super().call(whole, training)


class Dropout(CoreLayer):
    """In training, sets a share of the values to 0 and divides the others by 1 - rate.

    Args:
        rate: the share, in [0, 1).
        noise_shape: must be None.
        seed: seed of the choice; None means one that `keras.utils.set_random_seed` determines.
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: `noise_shape` is given.
    """

    def __init__(self, rate: float, noise_shape: None = None, seed: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if noise_shape is not None:
            raise errors.InvalidLayer("Dropout(noise_shape=...) is not supported; leave it out", kind="Dropout")
        self._layer = shoal_nn.Dropout(rate)
        self._seed = self._seed if seed is None else seed

    def core(self) -> shoal_nn.Layer:
        return self._layer


class Flatten(CoreLayer):
    """Reshapes samples to one axis.

    Args:
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.
    """

    def __init__(self, data_format: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_channels_last("Flatten", data_format)

    def core(self) -> shoal_nn.Layer:
        return shoal_nn.Flatten()


class Reshape(CoreLayer):
    """Reshapes samples.

    Args:
        target_shape: shape of an output sample; one length can be -1.
        **kwargs: see `Layer`.
    """

    def __init__(self, target_shape: Sequence[int], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._layer = shoal_nn.Reshape(tuple(target_shape))

    def core(self) -> shoal_nn.Layer:
        return self._layer


class Resizing(CoreLayer):
    """Resizes images [batch, height, width, channels].

    Args:
        height: new height.
        width: new width.
        interpolation: "bilinear" or "nearest".
        crop_to_aspect_ratio: must be False.
        pad_to_aspect_ratio: must be False.
        fill_mode: has an effect only with `pad_to_aspect_ratio`.
        fill_value: as `fill_mode`.
        antialias: must be False.
        data_format: must be None or "channels_last".
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: an argument is another one.
    """

    def __init__(
        self,
        height: int,
        width: int,
        interpolation: Literal["bilinear", "nearest"] = "bilinear",
        crop_to_aspect_ratio: bool = False,
        pad_to_aspect_ratio: bool = False,
        fill_mode: str = "constant",
        fill_value: float = 0.0,
        antialias: bool = False,
        data_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        del fill_mode, fill_value
        check_channels_last("Resizing", data_format)
        if crop_to_aspect_ratio or pad_to_aspect_ratio or antialias:
            raise errors.InvalidLayer(
                "Resizing with crop_to_aspect_ratio, pad_to_aspect_ratio or antialias is not supported; leave them out",
                kind="Resizing",
            )
        self._layer = shoal_nn.Interpolate((height, width), interpolation)

    def core(self) -> shoal_nn.Layer:
        return self._layer


class Rescaling(CoreLayer):
    """y = x * scale + offset.

    Args:
        scale: a number, or one for each channel.
        offset: as `scale`.
        **kwargs: see `Layer`.
    """

    def __init__(self, scale: Any, offset: Any = 0.0, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._layer = shoal_nn.Rescale(_numbers(scale), _numbers(offset))

    def core(self) -> shoal_nn.Layer:
        return self._layer


class Normalization(CoreLayer):
    """y = (x - mean) / sqrt(variance), with given statistics for each channel, or the inverse.

    Args:
        axis: must be -1.
        mean: a number, or one for each channel.
        variance: as `mean`.
        invert: whether to compute y = x * sqrt(variance) + mean.
        **kwargs: see `Layer`.

    Raises:
        InvalidLayer: `axis` is another one, or a statistic is missing.
    """

    def __init__(
        self, axis: int = -1, mean: Any = None, variance: Any = None, invert: bool = False, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        if axis != -1 or mean is None or variance is None:
            raise errors.InvalidLayer(
                "Normalization needs axis=-1, a mean and a variance; adapt() is not supported", kind="Normalization"
            )
        deviation = np.maximum(np.sqrt(np.asarray(variance, float)), 1e-7)  # as in Keras
        middle = np.asarray(mean, float)
        factor, offset = (deviation, middle) if invert else (1 / deviation, -middle / deviation)
        self._layer = shoal_nn.Rescale(_numbers(factor), _numbers(offset))

    def core(self) -> shoal_nn.Layer:
        return self._layer


def check_channels_last(layer: str, data_format: str | None) -> None:
    """Raises InvalidLayer unless the channels are the last axis."""
    if data_format not in {None, "channels_last"}:
        raise errors.InvalidLayer(
            f"{layer}(data_format={data_format!r}) is not supported; images are [batch, height, width, channels]",
            kind=layer,
        )


def _numbers(given: Any) -> float | tuple[float, ...]:
    array = np.asarray(given, float)
    return float(array) if array.ndim == 0 else tuple(map(float, array.reshape(-1)))


__all__ = [
    "ActivatedLayer",
    "Dense",
    "Dropout",
    "Embedding",
    "Flatten",
    "Normalization",
    "Rescaling",
    "Reshape",
    "Resizing",
    "check_channels_last",
]
