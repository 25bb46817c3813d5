"""Mixed precision: the dtype that a model computes in, and loss scaling for float16.

Layers compute in the dtype of their input and return gradients in the dtype of their parameters. Parameters therefore
stay in float32 (master values), and only the input is cast. See Micikevicius et al., "Mixed precision training", ICLR
2018.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import ml_dtypes
import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_nn._ops import widened
from shoal_worker.arrays import namespace_of

Compute = Literal["float64", "float32", "float16", "bfloat16"]

_COMPUTE: Mapping[Compute, np.dtype[Any]] = {
    "float64": np.dtype(np.float64),
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
# A scale below 1 has no use: gradients that overflow at 1 overflow without scaling.
_LEAST_SCALE, _LARGEST_SCALE = 1.0, 2.0**24


@dataclass(frozen=True)
class Policy:
    """Dtype in which a model computes.

    Args:
        compute: the dtype, by name. "float16" needs a `LossScale`. "bfloat16" has the range of float32 and needs none;
            CuPy supports it from version 14.

    Raises:
        InvalidLayer: the dtype is unknown.
    """

    compute: Compute = "float32"

    def __post_init__(self) -> None:
        if self.compute not in _COMPUTE:
            raise errors.InvalidLayer(f"a policy computes in one of {', '.join(_COMPUTE)}, not {self.compute!r}")

    def inputs(self, x: Any) -> Any:
        """Casts a model's input, an array or features by name, to this dtype. Integers stay."""
        if isinstance(x, Mapping):
            return {name: self.inputs(feature) for name, feature in x.items()}
        return x if x.dtype.kind in "iub" else x.astype(_COMPUTE[self.compute], copy=False)

    def outputs(self, y: Array) -> Array:
        """Casts a model's output for a loss: 16-bit floats to float32."""
        return widened(y)

    def gradient(self, dy: Array) -> Array:
        """Casts the scaled gradient of the loss to the dtype of the model's pullback."""
        return dy.astype(_COMPUTE[self.compute], copy=False)


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale: a factor of the loss's gradient that keeps small gradients from vanishing in float16.

    If a gradient overflows, the step is skipped and the scale is halved. A step without an overflow is a good step.
    After `interval` good steps the scale is doubled. Objects are immutable: `after` returns the next one.

    Example:
        A step of a loop with a variable `scale`:

            logits, new_state, pullback = net.apply(params, state, policy.inputs(x), TrainingContext(seed))
            loss, dlogits = softmax_cross_entropy(policy.outputs(logits), labels)
            gradients, _ = pullback(policy.gradient(scale.scaled(dlogits)))
            gradients, finite = scale.unscaled(gradients)
            scale = scale.after(finite)
            if finite:
                state = new_state
                push(gradients)

    Args:
        scale: from 1 to 2^24; it stays within these bounds.
        interval: good steps before it is doubled, > 0.
        good_steps: good steps since the last change, >= 0.

    Raises:
        InvalidLayer: an argument is out of range.
    """

    scale: float = 2.0**15
    interval: int = 2000
    good_steps: int = 0

    def __post_init__(self) -> None:
        if not (_LEAST_SCALE <= self.scale <= _LARGEST_SCALE and self.interval > 0 and self.good_steps >= 0):
            raise errors.InvalidLayer(
                f"loss scale {self.scale:g}, interval {self.interval}, good_steps {self.good_steps}; give a scale from "
                "1 to 2^24, an interval of 1 or more, and good_steps of 0 or more"
            )

    def scaled(self, dy: Array) -> Array:
        """Multiplies the loss's gradient by the scale."""
        return dy * self.scale

    def unscaled(self, gradients: Mapping[str, Array]) -> tuple[dict[str, Array], bool]:
        """Divides the gradients by the scale. Also returns whether all are finite."""
        smaller = {name: gradient * (1 / self.scale) for name, gradient in gradients.items()}
        if not smaller:
            return {}, True
        xp = namespace_of(next(iter(smaller.values())))
        finite = xp.stack([xp.isfinite(gradient).all() for gradient in smaller.values()])
        return smaller, bool(finite.all())  # waits for a GPU once, not once for each gradient

    def after(self, finite: bool) -> "LossScale":
        """Returns the scale for the next step; `finite` says whether this step's gradients were finite."""
        if not finite:
            return replace(self, scale=max(self.scale / 2, _LEAST_SCALE), good_steps=0)
        if self.good_steps + 1 < self.interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(self.scale * 2, _LARGEST_SCALE), good_steps=0)


__all__ = ["Compute", "LossScale", "Policy"]
