"""Programs of jobs that tests watch on the coordinator's page."""

import time
from pathlib import Path
from typing import Any

import numpy as np

from support.programs.broken import Numbers

HOSTILE = "<img src=x onerror=\"document.title='hacked'\"><script>document.title='hacked'</script>"


class Watched:
    """Learns to be 1 slowly enough to be watched, and is evaluated.

    Args:
        size: number of samples to train on.
        seconds: duration of a step.
        hostile: whether it writes text that a page must not treat as HTML.
        slow: a file. The first worker creates it, and takes three times as long.
    """

    def __init__(self, size: int = 512, seconds: float = 0.02, hostile: bool = False, slow: str = "") -> None:
        self.dataset, self.held_out = Numbers(size), Numbers(10)
        self.seconds, self.hostile = seconds, hostile
        self.draw = np.random.default_rng()
        self.steps = 0
        if slow:
            try:
                Path(slow).touch(exist_ok=False)
            except FileExistsError:
                return
            self.seconds *= 3

    def variables(self) -> Any:
        return {"w": np.zeros(100_000), "b": np.zeros(50_000)}

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        time.sleep(self.seconds)  # what a step takes
        self.steps += 1
        away = {name: value - 1 for name, value in params.items()}
        loss = float((away["w"] ** 2).mean() * (1 + 0.05 * self.draw.normal()))
        if self.steps % 20 == 1:
            print(HOSTILE if self.hostile else f"step {self.steps}: loss {loss:.4f}", flush=True)
        return loss, away

    def evaluate(self, params: Any, batch: Any) -> Any:
        return {"accuracy": float(1 - np.abs(params["w"] - 1).mean())}
