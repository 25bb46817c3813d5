"""The workloads that Shoal and every peer run, each with one server and one worker except `small_cluster`.

All processes run on one machine.

dense:  161 float32 tensors (ResNet-50's count), 106 MB. A step reads every tensor on the worker, computes
        g = 1e-6 * w + 1e-3 for each, and has the server apply w -= 1e-3 * g. A step counts as 2 x 106 MB in GB/s.
small:  the dense step on 10 tensors of 1,000 float32. It shows the cost of a step that moves few bytes. The result is
        steps per second.
small_cluster: the dense step on the tensors of an MLP, 784-52-32-10, 171 KB. Two servers and two workers train it
        asynchronously. The result is the steps per second of both workers together.
sparse: a 2,000,000 x 16 float32 table. A step draws 4096 x 26 ids, Zipf(1.1) modulo the table's size. It fetches the
        unique rows, sums g = 1e-3 * row + 1e-3 by unique row, and has the server apply Adagrad (lr 0.01, initial
        accumulator 0.1). The result is ids (not unique ids) per second. Shoal has no sparse tables yet.

The project received this module together with the measurements on which the project's targets are based. The project
has added only `small_cluster`. Shoal and each peer import this module in an interpreter of their own, which may lack
NumPy. Only the sparse workload imports NumPy.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

DENSE_SHAPES = [(1024, 1024)] * 25 + [(2048,)] * 136
SMALL_SHAPES = [(1000,)] * 10
MLP_SHAPES = [(784, 52), (52,), (52, 32), (32,), (32, 10), (10,)]
DENSE_BYTES = 4 * sum(math.prod(s) for s in DENSE_SHAPES)
ROWS, DIM, IDS = 2_000_000, 16, 4096 * 26


def shapes(kind: str) -> Sequence[tuple[int, ...]]:
    if kind == "small_cluster":
        return MLP_SHAPES
    return SMALL_SHAPES if kind == "small" else DENSE_SHAPES


def id_batches(count: int = 4) -> list[Any]:
    import numpy as np  # noqa: PLC0415 - see above

    rng = np.random.default_rng(0)
    return [(rng.zipf(1.1, IDS) % ROWS).astype(np.int64) for _ in range(count)]


def measure(run_steps: Callable[[int], object], rounds: int = 5, seconds_a_round: float = 0.5) -> float:
    """Median seconds a step; run_steps(n) runs n steps and waits for them."""
    run_steps(3)
    start = time.perf_counter()
    run_steps(3)
    steps = max(3, round(seconds_a_round * 3 / (time.perf_counter() - start)))
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run_steps(steps)
        times.append((time.perf_counter() - start) / steps)
    return sorted(times)[len(times) // 2]


def report(peer: str, kind: str, seconds: float) -> None:
    figure = {
        "dense": {"gb_per_s": 2 * DENSE_BYTES / seconds / 1e9},
        "small": {"steps_per_s": 1 / seconds},
        "small_cluster": {"steps_per_s": 1 / seconds},
        "sparse": {"m_ids_per_s": IDS / seconds / 1e6},
    }[kind]
    print(json.dumps({"peer": peer, "workload": kind, "ms_per_step": seconds * 1e3, **figure}), flush=True)
