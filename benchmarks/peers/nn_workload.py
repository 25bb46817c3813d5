"""Workload of the model benchmarks: models and batches that Shoal and PyTorch both train on, on one thread, in float32.

A step computes the model's output in training mode, the cross-entropy loss of the labels, and the gradients with
respect to all parameters. It updates no parameters, and computes no gradient with respect to the images. Shoal and
PyTorch import this module in separate interpreters, so it needs only the standard library.
"""

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

CLASSES = 10
# One thread, whichever library it is that multiplies.
ONE_THREAD = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}


@dataclass(frozen=True)
class Work:
    """A model and its input."""

    name: str  # for tables
    parameters: int  # without running statistics: both sides' models must have as many
    batch: int
    image: tuple[int, int, int]  # height, width, channels


MODELS = {
    "resnet18": Work("ResNet-18", 11_173_962, 32, (32, 32, 3)),
    "mobilenet_v2": Work("MobileNetV2 0.35", 408_938, 64, (32, 32, 3)),
    "small_cnn": Work("the small CNN", 421_642, 64, (28, 28, 1)),
}


def measure(step: Callable[[], float], *, short: bool) -> tuple[float, float]:
    """Returns the median seconds of a step, and the last loss. It takes 7 or more steps, after 2 for warming up.

    Args:
        step: takes one step and returns its loss.
        short: take only one step.
    """
    for _ in range(0 if short else 2):
        step()
    times: list[float] = []
    while True:
        began = time.perf_counter()
        loss = step()
        times.append(time.perf_counter() - began)
        if short or (len(times) >= 7 and sum(times) >= 3):
            return sorted(times)[len(times) // 2], loss


def report(peer: str, parameters: int, seconds: float, loss: float) -> None:
    figure = {"ms_per_step": seconds * 1e3, "parameters": parameters, "loss": loss if math.isfinite(loss) else None}
    print(json.dumps({"peer": peer, **figure}), flush=True)
