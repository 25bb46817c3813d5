"""The command of `make fuzz`: fuzzes all targets, writes runs/fuzz/latest.json and prints a table.

    python -m support.fuzzing --seconds 60
    python -m support.fuzzing --targets npz,idx --seed 7
    python -m support.fuzzing --replay runs/fuzz/inputs/npz/1234 --targets npz

It exits with 1 if an input went wrong, or if the resident memory of a target grew by 5%.
"""

import argparse
import logging
import random
import sys
from pathlib import Path

import structlog

from support.fuzzing import targets
from support.fuzzing.campaign import Row, attempt, fuzz_all, table, write

MOST_GROWTH = 0.05


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds for all targets together; default: 600")
    parser.add_argument(
        "--processes", type=int, default=1, help="targets fuzzed at a time, which divides the seconds; default: 1"
    )
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 31), help="seed; default: drawn and printed")
    parser.add_argument("--targets", default="", help="names of targets, with commas; default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/fuzz"), help="folder of results; default: runs/fuzz")
    parser.add_argument("--replay", type=Path, help="feeds one file to the target, and raises what it raises")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    chosen = targets.chosen(options.targets)
    if options.replay:
        (target,) = chosen
        target.start()
        attempt(target, options.replay.read_bytes())
        print("right")
        return 0
    print(f"seed {options.seed}", flush=True)
    share = options.seconds / sum(map(targets.weight_of, chosen))
    seconds = {target: share * targets.weight_of(target) for target in chosen}
    order = [target.name for target in chosen]
    rows: list[Row] = []
    for row in fuzz_all(seconds, options.seed, options.out / "inputs", options.processes):
        rows = sorted([*rows, row], key=lambda each: order.index(each.target))
        write(rows, options.seed, options.out / "latest.json")
    print(table(rows))
    wrong = [row.target for row in rows if row.crashes or row.unexpected_status or row.rss_growth >= MOST_GROWTH]
    print(f"wrong: {', '.join(wrong)}" if wrong else "all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
