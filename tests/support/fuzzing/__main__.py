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
from support.fuzzing.campaign import Row, attempt, fuzz, table, write

MOST_GROWTH = 0.05


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds for all targets together; default: 600")
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
    rows: list[Row] = []
    for target in chosen:
        rows.append(fuzz(target, options.seed, share * targets.weight_of(target), options.out / "inputs"))
        write(rows, options.seed, options.out / "latest.json")
    print(table(rows))
    wrong = [row.target for row in rows if row.crashes or row.unexpected_status or row.rss_growth >= MOST_GROWTH]
    print(f"wrong: {', '.join(wrong)}" if wrong else "all right")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
