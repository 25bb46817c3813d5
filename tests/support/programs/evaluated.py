"""Programs with evaluation."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np

from support.programs.broken import Numbers


class Counted:
    """Counts updates by SGD with rate 1: in a synchronous job, its value is the number of the step.

    Args:
        size: number of samples to train on.
        seconds: duration of a step.
        slow: seconds that the evaluation of a batch takes, except a worker's first batch, which checks the program.
        kill: a file. The first worker that evaluates a later batch creates it and dies.
    """

    def __init__(self, size: int = 64, seconds: float = 0.0, slow: float = 0.0, kill: str = "") -> None:
        self.dataset, self.held_out = Numbers(size), Numbers(10)
        self.seconds, self.slow, self.kill = seconds, slow, kill
        self.tried = False

    def variables(self) -> Any:
        return {"w": np.zeros(1_000)}

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        time.sleep(self.seconds)  # what a step takes
        return 1.0, {"w": -np.ones(1_000)}

    def evaluate(self, params: Any, batch: Any) -> Any:
        first, self.tried = not self.tried, True
        if first:
            return self.measured(params)
        if self.kill and not Path(self.kill).exists():
            Path(self.kill).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.slow)  # what an evaluation takes
        return self.measured(params)

    def measured(self, params: Any) -> dict[str, float]:
        return {"updates": float(params["w"][0]), "constant": 1.0}
