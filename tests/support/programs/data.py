"""Programs with samples in files."""

from typing import Any

import numpy as np

import shoal

FEATURES = 4


class Line:
    """Learns a line, and counts how often it saw each row, by the rows' column `number`."""

    def __init__(self, folder: str, window: int = 1, prefetch: int = 2, format: str = "parquet") -> None:
        source = {"parquet": shoal.data.Parquet, "csv": shoal.data.Csv}[format]
        self.dataset = source(folder, window=window, prefetch=prefetch)

    def variables(self) -> Any:
        return {
            "w": np.zeros(FEATURES),
            "seen": shoal.Variable((len(self.dataset),), trainable=False, aggregation="sum", dtype="int64"),
        }

    def loss_and_gradients(self, params: Any, batch: Any) -> Any:
        x = np.stack([batch[f"x{place}"] for place in range(FEATURES)], axis=1)
        error = x @ params["w"] - batch["y"]
        seen = np.zeros(len(self.dataset), np.int64)
        np.add.at(seen, batch["number"], 1)
        return shoal.StepOutput((error**2).mean(), {"w": 2 * x.T @ error / len(x)}, updates={"seen": seen})
