"""Cases of `tests/golden/layers.json`: layers, losses and a step of ResNet-18, with their inputs."""

import zlib
from dataclasses import dataclass
from typing import Any

import numpy as np

import shoal_nn
from shoal_nn import Layer, TrainingContext
from shoal_nn.models import resnet

STEP = TrainingContext(0)
IMAGES = (2, 4, 3, 4)


@dataclass(frozen=True)
class Case:
    layer: Layer
    shape: tuple[int, ...]  # of the batch it is fed
    rows: int = 0  # for whole numbers: they are less than this
    train: Any = STEP


CASES = {
    "dense": Case(shoal_nn.Dense(5), (3, 2, 4)),
    "embedding": Case(shoal_nn.Embedding(6, 3), (4, 2), rows=6),
    "convolution": Case(shoal_nn.Conv2D(3, window=3, strides=2, padding=1), IMAGES),
    "groups": Case(shoal_nn.Conv2D(6, window=(3, 2), padding=(1, 0), groups=2), IMAGES),
    "depthwise": Case(shoal_nn.DepthwiseConv2D(2, window=3, padding=1), IMAGES),
    "batch norm": Case(shoal_nn.BatchNorm(), IMAGES),
    "batch norm of rows": Case(shoal_nn.BatchNorm(momentum=0.3), (5, 3)),
    "batch norm, evaluated": Case(shoal_nn.BatchNorm(), IMAGES, train=False),
    "layer norm": Case(shoal_nn.LayerNorm(), (3, 2, 6)),
    "largest": Case(shoal_nn.MaxPool(3, 2, 1), IMAGES),
    "mean": Case(shoal_nn.AvgPool(3, 2, 1), IMAGES),
    "mean with padding": Case(shoal_nn.AvgPool(3, 2, 1, count_padding=True), IMAGES),
    "mean of all": Case(shoal_nn.GlobalAvgPool(), IMAGES),
    "gelu": Case(shoal_nn.GELU(), (3, 5)),
}
LOGITS = (2, 2, 5)
RESNET, RESNET_IMAGES, RESNET_LABELS = resnet(18, 10), (4, 64, 64, 3), np.array([3, 1, 4, 1])


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns pseudo-random numbers from -1 to 1, computed from the name alone.

    They are computed as integers, so that no version of NumPy changes them.
    """
    size = int(np.prod(shape))
    key = np.full(size, zlib.crc32(name.encode()))
    crossed: np.ndarray = shoal_nn.crossed(np.arange(size), key, 1 << 24)
    return (crossed / (1 << 23) - 1).reshape(shape)


def fed(name: str) -> np.ndarray:
    """Returns the input of a case's layer."""
    case = CASES[name]
    x = drawn(f"{name} x", case.shape)
    return (abs(x) * case.rows).astype(int) if case.rows else x


def values(layer: Layer, shape: tuple[int, ...]) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Returns parameters and state in float64: kernels by He's rule, scales and variances near 1, others near 0."""
    params: dict[str, np.ndarray] = {}
    state: dict[str, np.ndarray] = {}
    for name, variable in layer.variables(shape).items():
        array = drawn(name, variable.shape)
        if array.ndim > 1:
            array = array * (6 / np.prod(array.shape[:-1])) ** 0.5
        elif name.endswith(("scale", "var")):
            array = 1 + array / 4
        (params if variable.trainable else state)[name] = array
    return params, state


def digest(name: str, array: np.ndarray) -> list[float]:
    """Returns a digest of a large array: its norm, and its product with the array that `drawn` returns for the name."""
    return [float(np.linalg.norm(array)), float((array * drawn(f"probe {name}", array.shape)).sum())]
