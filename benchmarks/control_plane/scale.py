"""The control plane with many members, and the constants of the scale model: `make scale`.

python benchmarks/control_plane/scale.py [--workers N] [--servers N] ... [--keep]

The coordinator is real, in a process of its own, and its members are simulated (`members`): they register, enter one
job, send heartbeats, lease samples and report. The script measures how long entry takes; how much processor time the
coordinator uses while all workers train, both without watchers and while clients watch another job; how soon servers
release a silent worker; and how soon the last worker learns that its job was cancelled. It then measures what a call
without any work costs a gRPC server (`bare_calls`), and what steps cost real servers and workers (`constants`);
`--short` takes what steps cost from benchmarks/results/scale.json.

It prints one JSON line. Its exit status is 1 if a target is missed. `--keep` writes the line to
benchmarks/results/scale.json, and renews the tables and the chart of docs/explanation/scale.md (`scale_page`).
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import machine
import scale_page
from admission import scale_of
from bare_calls import us_per_bare_call
from constants import data_plane
from phases import Scale, admit, cancel, remove, rest, simulated, train, watch

# Targets for 1,000 workers, 100 servers and a heartbeat timeout of 10 s: cores, and seconds.
CORES, ADMISSION_S, CANCEL_S, REMOVAL_AFTER_TIMEOUT_S = 0.3, 10.0, 3.0, 1.0
# Cost of a call while many clients watch another job, relative to its cost without watchers.
WATCHED_RATIO = 1.1


def control_plane(scale: Scale) -> dict[str, Any]:
    """Returns the measurements of one run."""
    with simulated(scale) as run:
        measured = dict(run.facts)
        for phase in (admit, train, watch, remove, cancel, rest):
            measured |= phase(run)
    # After the members have ended: they would compete for the processors.
    measured["us_per_bare_call"] = round(us_per_bare_call(scale.measured_s / 3))
    return measured


def misses(measured: dict[str, Any]) -> list[str]:
    """Returns the targets that are missed, in words."""
    most = {
        "admitted_s": ADMISSION_S,
        "joined_s": ADMISSION_S,
        "coordinator_cores": CORES,
        "watched_ratio": WATCHED_RATIO,
        "cancel_s": CANCEL_S,
        "released_after_s": measured["heartbeat_timeout_s"] + REMOVAL_AFTER_TIMEOUT_S,
        "declared_lost": 0,
    }
    return [f"{name} at most {limit:g}" for name, limit in most.items() if measured[name] > limit]


def main() -> int:
    """Runs the benchmark, and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--keep", action="store_true", help="write the metrics, and renew the page and its chart")
    parser.add_argument("--short", action="store_true", help="measure only the control plane")
    scale, options = scale_of(parser)
    load = round(os.getloadavg()[0], 1)  # before this run
    measured = control_plane(scale)
    line = {
        "date": machine.now(),
        "machine": {**machine.described({}), "load_before": load},
        "control_plane": {**measured, "missed": misses(measured)},
        "data_plane": scale_page.kept()["data_plane"]
        if options.short
        else data_plane() | {"limits": machine.limits({})},
    }
    print(json.dumps(line))
    if options.keep:
        scale_page.RESULT.write_text(json.dumps(line, indent=2) + "\n")
        scale_page.renew()
    return bool(line["control_plane"]["missed"])


if __name__ == "__main__":
    sys.exit(main())
