"""Command line of the simulation: `python -m simulation --seeds 10000`, or `--seed 42` to replay one run."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from simulation import campaign
from simulation.cluster import run
from simulation.nodes import ServerNode
from simulation.plan import plan_of
from simulation.planted import PLANTED

LATEST = Path(__file__).parents[2] / "runs" / "simulation" / "latest.json"


def main(arguments: Sequence[str], latest: Path = LATEST) -> int:
    """Runs seeds, or replays one. Returns 1 if an invariant is broken, or a planted bug is not found."""
    parser = argparse.ArgumentParser(prog="simulation", description="Simulated clusters with faults, by seeds.")
    parser.add_argument("--seeds", type=int, default=10_000, help="number of seeds (default: 10000)")
    parser.add_argument("--first", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
    parser.add_argument("--seed", type=int, help="replay this seed, print its messages, and shrink it if it fails")
    parser.add_argument("--bug", choices=[*PLANTED], help="plant this bug in the replay")
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return replay(options.seed, PLANTED[options.bug] if options.bug else ServerNode)
    rows = [campaign.clean(options.first, options.seeds, options.processes, print)]
    rows += [campaign.planted(name, options.first)[0] for name in PLANTED]
    campaign.save(rows, latest)
    for row in rows:
        found = f", found after {row.found_after} seeds" if row.found_after else ""
        print(
            f"{row.name:22} {row.seeds:6} seeds, {row.events:9} events, {row.violations:3} violations, "
            f"{row.seeds_per_minute:5.0f} seeds a minute{found}"
        )
    if rows[0].failed:
        print("replay one with: make simulate SEED=n")
    return 0 if all(row.holds for row in rows) else 1


def replay(seed: int, server_class: type[ServerNode]) -> int:
    """Replays a seed. Returns 1 if it breaks an invariant."""
    plan = plan_of(seed)
    result = run(plan, server_class, print)
    print(plan.described())
    print(f"digest {result.digest}: {result.what or 'no invariant is broken'}")
    if not result.rule:
        return 0
    smallest = campaign.smallest(result, server_class)
    print(f"shrunk to {len(smallest.plan.faults)} faults, {smallest.events} events:")
    print(smallest.plan.described())
    print(smallest.what)
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
