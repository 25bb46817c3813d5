"""Runner of the benchmarks: python benchmarks/run.py [dense,small,...], or `make bench`.

Shoal and the peers run in turn, and the script compares their medians. A peer takes part if its interpreter is known:
`make bench-peers` has built it, or a variable names it, such as `SHOAL_PEER_TORCH=/path/to/python`. The exit status is
1 if a row is missing. A missed target is reported, but does not change the exit status.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import machine
import nn
import processes
import psutil
import record
import rivals
import rows
import steps
from adapters import torch_rows
from harness import Run, median, ours
from record import Results
from rich.console import Console
from rich.table import Table
from rows import Row, compared

# What the pull of 6 GB needs free, for two processes and what the allocator keeps.
PULL_NEEDS_BYTES = 18 * 10**9


def kernels(run: Run) -> list[Row]:
    """Compares the optimizers' kernels with torch's. Returns only the rows that the results include."""
    import kernels as measured  # noqa: PLC0415 - loads numba, in this process, when it is wanted

    torch = run.interpreters.get("torch", "")
    return [Row.from_json(row) for row in measured.rows(run.rounds, torch) if row["name"] in rows.FIGURES]


def memory(run: Run) -> list[Row]:
    """Measures the memory of a server and a worker, and the time until a server is ready."""
    contestants = {
        "rest": ours("Shoal, memory at rest", "memory.py", "rest", *run.short_flag),
        "pull": ours("Shoal, pull of 6 GB", "memory.py", "pull", *run.short_flag, timeout_s=600),
        "ready": ours("Shoal, start of a server", "ready.py", *run.short_flag),
    }
    available = psutil.virtual_memory().available
    if available < PULL_NEEDS_BYTES and not run.short:
        run.skip("memory_pull_6gb", f"it needs 18 GB, and {available / 1e9:.1f} are available")
        del contestants["pull"]
    seen = run.contest("memory", list(contestants.values()), rounds=1)
    lines = {name: seen[contestant.name][0] for name, contestant in contestants.items() if contestant.name in seen}
    found, limit = [], "Shoal's limit"
    if rest := lines.get("rest"):
        found.append(compared("memory_rest", max(rest["created_mb"], rest["ended_mb"]), "MB", limit, rest["limit_mb"]))
        found.append(compared("memory_rest_open", rest["open_mb"], "MB", limit, rest["limit_mb"]))
    if pull := lines.get("pull"):
        peak = max(pull["server_mb"], pull["worker_mb"])
        found.append(compared("memory_pull_6gb", peak, "MB", limit, pull["limit_mb"]))
    if ready := lines.get("ready"):
        found.append(compared("ready_seconds", ready["seconds"], "s", limit, 2.5))
    return found


def waiting_pulls(run: Run) -> list[Row]:
    """Measures pushes while pulls wait."""
    script = ours("Shoal, pushes beside 200 waiting pulls", "waiting_pulls.py", *run.short_flag)
    lines = run.contest("waiting_pulls", [script], rounds=1).get(script.name)
    if not lines:
        return []
    beside, alone = median(lines, "ours_ms"), median(lines, "alone_ms")
    return [compared("waiting_pulls", beside, "ms", "Shoal, no pull waits", alone)]


def data(run: Run) -> list[Row]:
    """Compares two workers that read data with Arrow."""
    script = ours("Shoal, two workers read Parquet", "data.py", *run.short_flag, timeout_s=600)
    lines = run.contest("data", [script], rounds=1).get(script.name)
    if not lines:
        return []
    arrow, peer = median(lines, "arrow_gb_per_s"), "Arrow's dataset scan"
    return [
        compared("parquet_scan", median(lines, "shuffled_gb_per_s"), "GB/s", peer, arrow),
        compared("parquet_scan_in_order", median(lines, "in_order_gb_per_s"), "GB/s", peer, arrow),
    ]


def checkpoints(run: Run) -> list[Row]:
    """Compares saves and restores with those of a plain file, and training with and without checkpoints."""
    speed = ours("Shoal, a server saves and restores", "checkpoints.py", "speed", *run.short_flag)
    slowdown = ours("Shoal, training with checkpoints", "checkpoints.py", "slowdown", *run.short_flag, timeout_s=600)
    seen = run.contest("checkpoints", [speed, slowdown], rounds=1)
    pairs = {
        "checkpoint_write": (speed, "save_gb_per_s", "plain_write_gb_per_s", "GB/s", "a plain write with fsync"),
        "checkpoint_restore": (speed, "restore_gb_per_s", "plain_read_gb_per_s", "GB/s", "a plain read"),
        "checkpoint_slowdown": (slowdown, "steps_per_s", "alone_steps_per_s", "steps/s", "Shoal, no checkpoints"),
    }
    return [
        compared(row, median(lines, mine), unit, peer, median(lines, theirs))
        for row, (script, mine, theirs, unit, peer) in pairs.items()
        if (lines := seen.get(script.name))
    ]


BENCHES: Mapping[str, Callable[[Run], list[Row]]] = {
    "dense": steps.dense,
    "small": steps.small,
    "tls": steps.tls,
    "authorization": steps.authorization,
    "replicas": steps.replicas,
    "small_cluster": steps.small_cluster,
    "all_reduce": steps.all_reduce,
    "kernels": kernels,
    "scale": steps.scale,
    "memory": memory,
    "waiting_pulls": waiting_pulls,
    "data": data,
    "checkpoints": checkpoints,
    "nn": nn.nn,
    "torch": torch_rows.torch,
    "chunks": steps.chunks,
}


def main() -> int:
    options = _options()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    processes.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that scripts are ended on the way out
    given = {} if options.no_peers else rivals.interpreters()
    for name in [] if options.no_peers else [name for name in rivals.BY_NAME if name not in given]:
        console.print(f"no interpreter for {name}: `make bench-peers` builds one, {rivals.variable(name)} names one")
    os.environ.update({rivals.variable(name): given.get(name, "") for name in rivals.BY_NAME})  # also the found ones
    run = Run(1 if options.short else options.rounds, options.short, given, console.print)
    about = machine.described(given)
    limits = {} if run.short else machine.limits(given)
    found: list[Row] = []
    for bench in options.benches:
        new = measured(run, bench, about, limits)
        found += new.rows
        keep(new, options.results)
    Console(width=None if sys.stdout.isatty() else 200).print(table(found))
    for bench, reasons in run.left_out.items():
        for name, reason in reasons.items():
            console.print(f"{bench}: {name} is left out: {reason}")
    lost = rows.missing(found, options.benches, peers=bool(given), skipped=run.skipped)
    for name in lost:
        console.print(f"missing: {name}")
    return 1 if lost else 0


def measured(run: Run, bench: str, about: Mapping[str, Any], limits: Mapping[str, float]) -> Results:
    """Runs one benchmark."""
    found = BENCHES[bench](run)
    reasons = {name: reason.splitlines()[0] for name, reason in run.left_out.get(bench, {}).items()}
    rounds = max(map(len, run.lines.get(bench, {}).values()), default=run.rounds)
    ran = {"date": machine.now(), "rounds": rounds, "limits": limits, "left_out": reasons, "machine": about}
    return Results(found, {bench: run.lines.get(bench, {})}, {bench: ran})


def keep(new: Results, folder: Path) -> None:
    """Adds a benchmark's results to the files of results and to the docs."""
    everything = record.load(folder).replaced(new)
    record.save(everything, folder)
    if folder == record.FOLDER:
        record.DOCS.write_text(record.fill(record.DOCS.read_text(), everything.block()))


def table(found: Sequence[Row]) -> Table:
    """Returns the rows as text for a terminal."""
    drawn = Table(*rows.HEADINGS)
    for row in found:
        drawn.add_row(*rows.cells(row), style={True: "green", False: "red", None: ""}[row.holds])
    return drawn


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures Shoal, and other systems at the same work.")
    parser.add_argument(
        "benches",
        nargs="?",
        type=_benches,
        default=list(rows.DEFAULT_BENCHES),
        help=f"benchmarks to run, with commas between them, of {','.join(BENCHES)}",
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=5,
        help="number of rounds of each system (default: 5); results count from 3 rounds on",
    )
    parser.add_argument(
        "--short", action="store_true", help="make short runs that only test the benchmarks; their results mean nothing"
    )
    parser.add_argument("--no-peers", action="store_true", help="measure Shoal only, without other systems")
    parser.add_argument(
        "--results", type=Path, help="folder for the results (default: benchmarks/results, and the documentation)"
    )
    options = parser.parse_args()
    if options.results is None:
        if options.short:
            parser.error("--short needs --results FOLDER, since its results must not replace those in the repository")
        options.results = record.FOLDER
    return options


def _benches(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if unknown := set(names) - BENCHES.keys():
        raise argparse.ArgumentTypeError(f"there is no {min(unknown)}; choose some of {', '.join(BENCHES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
