"""Benchmark of two workers that read Parquet, compared with Arrow: python benchmarks/data.py, prints one JSON line.

The script writes 1 GB of files to a temporary folder. They stay in the page cache. They hold a table of clicks: a
label, 13 numbers and 26 categories, in row groups of 65,536 rows. Two processes take ranges alternately. The ranges
have the coordinator's default size. The processes read them as a worker's loop does: in shuffled batches, read ahead.
For comparison, one process scans the same columns with Arrow's dataset, with one thread for each core. Shoal and Arrow
use the same two cores, and take turns. Nothing is computed on the data.
"""

import argparse
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

WORKERS = CORES = 2
ROUNDS = 5
BYTES = 10**9
FILE_ROWS, GROUP_ROWS = 1 << 19, 1 << 16
NUMBERS, CATEGORIES = 13, 26
BATCH = 2048
SEED = 1
PATIENCE_S = 120.0
MB, GB = 10**6, 10**9


def write(folder: Path, size: int, file_rows: int) -> int:
    """Writes files of at least this many bytes in total. Returns the number of their rows."""
    import pyarrow as pa  # noqa: PLC0415 - a child sets its cores before it loads anything of Arrow
    import pyarrow.parquet as pq  # noqa: PLC0415

    rng = np.random.default_rng(SEED)
    written = rows = number = 0
    while written < size:
        columns = {"label": rng.integers(0, 2, file_rows, np.int32)}
        columns |= {f"number_{place}": rng.normal(size=file_rows).astype(np.float32) for place in range(NUMBERS)}
        # From a handful of values to hundreds of thousands.
        columns |= {
            f"category_{place}": rng.integers(0, 4 << (place * 18 // CATEGORIES), file_rows, np.int32)
            for place in range(CATEGORIES)
        }
        path = folder / f"part-{number:04}.parquet"
        pq.write_table(pa.table(columns), path, row_group_size=GROUP_ROWS)
        written, rows, number = written + path.stat().st_size, rows + file_rows, number + 1
    return rows


def read(folder: str, rank: int, window: int) -> Callable[[], dict[str, int]]:
    """Opens the files for one of the workers. Returns the function that reads its half."""
    from shoal._wire import DataRange, Lease, NoRange  # noqa: PLC0415
    from shoal.data import Parquet  # noqa: PLC0415
    from shoal_coordinator.job import default_range_size  # noqa: PLC0415
    from shoal_worker.batches import LeasedBatches  # noqa: PLC0415

    dataset = Parquet(folder, window=window)
    samples = len(dataset)
    size = default_range_size(samples, WORKERS, BATCH)
    starts = iter(range(rank * size, samples, WORKERS * size))

    def lease(done: int) -> Lease | NoRange:
        start = next(starts, None)
        if start is None:
            return NoRange.FINISHED
        return Lease(done + 1, DataRange(0, start, min(start + size, samples)))

    def run() -> dict[str, int]:
        batches = LeasedBatches(dataset, BATCH, SEED, lease)
        rows = labels = 0
        while batches.lease() is not NoRange.FINISHED:
            while batches.has_next:
                batch = batches.take().data
                rows += len(batch["label"])
                labels += int(batch["label"].sum())
        batches.close()
        return {"rows": rows, "labels": labels}

    return run


def scan(folder: str) -> Callable[[], dict[str, int]]:
    """Opens the files with Arrow. Returns the function that scans the same columns."""
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.compute as pc  # noqa: PLC0415
    import pyarrow.dataset as ds  # noqa: PLC0415

    pa.set_cpu_count(CORES)
    dataset = ds.dataset(folder, format="parquet")

    def run() -> dict[str, int]:
        rows = labels = 0
        for batch in dataset.to_batches():
            rows += batch.num_rows
            labels += pc.sum(batch.column("label")).as_py() or 0
        return {"rows": rows, "labels": labels}

    return run


def child(prepare: Callable[[], Callable[[], dict[str, int]]]) -> None:
    """Prepares, prints that it is ready, waits for a line, runs, and prints the result."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    run = prepare()
    print("ready", flush=True)
    if not sys.stdin.readline():  # the parent process has ended
        sys.exit("nobody said go")
    found = run()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    print(json.dumps({**found, "peak_bytes": peak}), flush=True)


def timed(*commands: list[str], threads: int) -> tuple[float, list[dict[str, int]]]:
    """Runs child processes. Returns the seconds from their start signal to their end, and their results."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    children = [
        subprocess.Popen(
            [sys.executable, __file__, *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        for each in children:
            assert each.stdout
            if each.stdout.readline() != "ready\n":
                sys.exit("a process that reads ended before it began")
        began = time.perf_counter()
        for each in children:
            assert each.stdin
            each.stdin.write("go\n")
            each.stdin.flush()
        lines = [each.stdout.readline() if each.stdout else "" for each in children]
        seconds = time.perf_counter() - began
        return seconds, [json.loads(line) for line in lines]
    finally:
        for each in children:
            each.kill()
            each.communicate(timeout=PATIENCE_S)


def measured(folder: str, rows: int, rounds: int) -> dict[str, float]:
    """Returns the medians over the rounds, in seconds, and the largest peak of a worker's memory."""
    workers = {
        name: [["worker", "--folder", folder, "--rank", str(rank), "--window", window] for rank in range(WORKERS)]
        for name, window in (("shuffled", "1"), ("in_order", "0"))
    }
    contestants = {
        "arrow": ([["scan", "--folder", folder]], CORES),
        **{name: (commands, CORES // WORKERS) for name, commands in workers.items()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    labels, peak = set(), 0
    for _ in range(rounds):
        for name, (commands, threads) in contestants.items():
            took, found = timed(*commands, threads=threads)
            if sum(each["rows"] for each in found) != rows:
                sys.exit(f"{name} read {found}, and there are {rows} rows")
            labels.add(sum(each["labels"] for each in found))
            seconds[name].append(took)
            if name == "shuffled":
                peak = max(peak, *(each["peak_bytes"] for each in found))
    if len(labels) != 1:
        sys.exit(f"not all read the same: {labels}")
    return {**{name: statistics.median(times) for name, times in seconds.items()}, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="?", choices=("worker", "scan"))
    parser.add_argument("--folder", default="", help="with the files, of a process that reads")
    parser.add_argument("--rank", type=int, default=0, help="of a worker")
    parser.add_argument("--window", type=int, default=1, help="blocks that are shuffled together; 0: none")
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figure means nothing")
    options = parser.parse_args()
    if options.what == "worker":
        child(lambda: read(options.folder, options.rank, options.window))
    elif options.what == "scan":
        child(lambda: scan(options.folder))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the files go, too
        with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
            rows = write(
                Path(folder), BYTES // (100 if options.short else 1), FILE_ROWS // (16 if options.short else 1)
            )
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
            found = measured(folder, rows, 1 if options.short else ROUNDS)
        results = {f"{name}_gb_per_s": size / found[name] / GB for name in ("arrow", "shuffled", "in_order")}
        print(json.dumps({**results, "worker_peak_mb": found["peak"] / MB, "rows": rows, "file_mb": size / MB}))


if __name__ == "__main__":
    main()
