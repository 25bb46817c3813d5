"""Variables of a session as a tree, with every kind of container and many kinds of arrays."""

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np


class Layer(NamedTuple):
    kernel: Any
    bias: Any


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def tree() -> dict[str, Any]:
    """Returns variables of every kind of container and of many kinds of arrays."""
    rng = np.random.default_rng(7)
    return {
        "layers": [
            Layer(rng.normal(size=(3, 4)).astype(np.float32).T, read_only(rng.normal(size=4))),
            Layer(rng.normal(size=8)[::-2], rng.normal(size=(2, 2)).astype(ml_dtypes.bfloat16)),
        ],
        "scale": (np.float32(1.5), np.array(2.5), np.float16(3.5)),
        "none": None,
        "count": np.arange(3),
    }


def leaves(tree: Any) -> dict[str, np.ndarray]:
    """Returns the arrays of `tree` by name."""
    layers = [
        (f"layers/{n}/{key}", it) for n, layer in enumerate(tree["layers"]) for key, it in layer._asdict().items()
    ]
    scales = [(f"scale/{n}", it) for n, it in enumerate(tree["scale"])]
    return {name: np.asarray(it) for name, it in [*layers, *scales, ("count", tree["count"])]}


def check_same(found: Any, given: Any) -> None:
    """Checks that two trees have the same dtypes, shapes and bits."""
    for (name, there), here in zip(leaves(found).items(), leaves(given).values(), strict=True):
        assert (there.dtype, there.shape, there.tobytes()) == (here.dtype, here.shape, here.tobytes()), name
