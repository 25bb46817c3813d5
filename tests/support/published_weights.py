"""Weights with published names, for tests of the models; `tests/golden/make_weights.py` feeds them to the originals."""

import math

import numpy as np

from support.devices.golden_layers import drawn

IMAGES = (2, 32, 32, 3)
WIDTH, CLASSES = 0.35, 10


def published_value(publisher: str, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the value of one array in a file of torchvision or Keras, of a size that keeps activations near 1.

    Args:
        publisher: "torchvision" or "keras".
        name: name of the array in the file.
        shape: its shape there.
    """
    random = drawn(f"{publisher} {name}", shape)
    if len(shape) > 1:
        depthwise = "depthwise" in name
        inputs = math.prod(shape[1:] if publisher == "torchvision" else shape[:2] if depthwise else shape[:-1])
        return (random * math.sqrt(6 / inputs)).astype(np.float32)
    around = 1 if name.endswith(("gamma", "variance", "running_var")) or (name.endswith("weight")) else 0
    return (around + random / 4).astype(np.float32)


__all__ = ["CLASSES", "IMAGES", "WIDTH", "published_value"]
