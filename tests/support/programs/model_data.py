"""Small data sets in files that models can learn."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq


def bright(path: Path, count: int = 300, channels: int = 1) -> str:
    """Writes an .npz file of images of 8 x 8. The class tells whether the upper or the lower half is brighter."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, count)
    images = rng.integers(0, 200, (count, 8, 8, channels))
    images[labels == 0, :4] += 50
    images[labels == 1, 4:] += 50
    np.savez(path, images=images.astype(np.uint8), labels=labels)
    return str(path)


def pairs(path: Path, rows: Any, seed: int) -> str:
    """Writes a table whose label depends only on the pair of a and b. No single column predicts it."""
    rng = np.random.default_rng(seed)
    a, b = rng.integers(0, 12, rows), rng.integers(0, 12, rows)
    columns = {
        "a": a,
        "b": b.astype(np.int8),
        "flag": rng.integers(0, 2, rows).astype(bool),
        "age": rng.integers(18, 80, rows),
        "rate": rng.normal(size=rows),
        "name": rng.choice(["x", "y"], rows),
        "label": np.random.default_rng(1).permuted(np.arange(144) % 2).reshape(12, 12)[a, b],
    }
    pq.write_table(pa.table(columns), path, row_group_size=50)
    return str(path)
