"""Mixed precision: halves to compute in, float32 to keep, and the scale that brings small gradients through float16.

Layers compute in the dtype of what they are fed and give gradients of their parameters' dtype, so parameters stay in
float32 (master values) and nothing but the input is cast. Micikevicius et al., "Mixed precision training" (ICLR 2018).
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
# Nothing is gained below 1: gradients that overflow there overflow as they are.
_LEAST_SCALE, _LARGEST_SCALE = 1.0, 2.0**24


@dataclass(frozen=True)
class Policy:
    """What a model computes in.

    Args:
        compute: "float16" wants a `LossScale`; "bfloat16" has the range of float32 and wants none; CuPy has it from
            version 14 on.

    Raises:
        InvalidLayer: it is none of these.
    """

    compute: Compute = "float32"

    def __post_init__(self) -> None:
        if self.compute not in _COMPUTE:
            raise errors.InvalidLayer(f"a policy computes in one of {', '.join(_COMPUTE)}, not {self.compute!r}")

    def inputs(self, x: Any) -> Any:
        """A model's input in this dtype, an array or features by name; whole numbers stay."""
        if isinstance(x, Mapping):
            return {name: self.inputs(feature) for name, feature in x.items()}
        return x if x.dtype.kind in "iub" else x.astype(_COMPUTE[self.compute], copy=False)

    def outputs(self, y: Array) -> Array:
        """A model's output as a loss wants it: halves as float32."""
        return widened(y)

    def gradient(self, dy: Array) -> Array:
        """The loss's gradient as the model's pullback wants it, after it was scaled."""
        return dy.astype(_COMPUTE[self.compute], copy=False)


@dataclass(frozen=True)
class LossScale:
    """What the loss's gradient is multiplied by, so that small ones do not vanish in float16; it finds its own size.

    A gradient that overflows is of no use: the step is skipped, and the scale halved. After `interval` good steps it is
    doubled. An object never changes: `after` gives the next one.

    Sample:
        A step of a loop that keeps `scale`:

            logits, new_state, pullback = net.apply(params, state, policy.inputs(x), Training(seed))
            loss, dlogits = softmax_cross_entropy(policy.outputs(logits), labels)
            gradients, _ = pullback(policy.gradient(scale.scaled(dlogits)))
            gradients, finite = scale.unscaled(gradients)
            scale = scale.after(finite)
            if finite:
                state = new_state
                push(gradients)

    Args:
        scale: from 1 to 2^24, where it stays.
        interval: good steps before it grows, > 0.
        good_steps: since it last changed.

    Raises:
        InvalidLayer: an argument is out of its range.
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
        """The loss's gradient, larger."""
        return dy * self.scale

    def unscaled(self, gradients: Mapping[str, Array]) -> tuple[dict[str, Array], bool]:
        """The gradients, as small as they are, and whether all are finite."""
        smaller = {name: gradient * (1 / self.scale) for name, gradient in gradients.items()}
        if not smaller:
            return {}, True
        xp = namespace_of(next(iter(smaller.values())))
        finite = xp.stack([xp.isfinite(gradient).all() for gradient in smaller.values()])
        return smaller, bool(finite.all())  # one wait for a GPU, not one for each

    def after(self, finite: bool) -> "LossScale":
        """For the next step, after one whose gradients were finite, or not."""
        if not finite:
            return replace(self, scale=max(self.scale / 2, _LEAST_SCALE), good_steps=0)
        if self.good_steps + 1 < self.interval:
            return replace(self, good_steps=self.good_steps + 1)
        return replace(self, scale=min(self.scale * 2, _LARGEST_SCALE), good_steps=0)


__all__ = ["Compute", "LossScale", "Policy"]
