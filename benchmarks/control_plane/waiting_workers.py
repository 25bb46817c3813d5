"""Benchmark of sessions that wait for one more: python benchmarks/control_plane/waiting_workers.py [--short].

The job has 10,000 variables and needs 41 sessions. At first, 40 sessions enter it and wait. Each one sends its own
heartbeats by the real protocol. The sessions run in a few processes. For a minute, the script measures the
coordinator's CPU time, and the gaps between the replies to each session's heartbeats. Then the last session enters, and
each session pulls and pushes once.

The script prints one JSON line. Its exit status is 1 if a target is missed: no heartbeat is late, the coordinator uses
at most 0.2 of a core while the sessions wait, and all sessions have trained 5 s after the last one entered. `missed` in
the line names the targets that are missed.
"""

import argparse
import json
import os
import sys
import time
from typing import Any

from simulated_members import cpu_s, members, ready

import shoal

JOB = "waits"  # of `waiting_sessions`
PROCESSES = 4
# A heartbeat is late if the reply to it comes later than the next one is due.
INTERVAL_S, LATE_INTERVALS = 0.5, 2.0
# Targets, by the names of the measurements: cores, and seconds.
MOST = {
    "longest_heartbeat_gap_s": LATE_INTERVALS * INTERVAL_S,
    "coordinator_cores": 0.2,
    "all_train_after_s": 5.0,
}


def measure(workers: int, variables: int, seconds: float) -> dict[str, Any]:
    spec = shoal.Job(name=JOB, workers=workers + 1, consistency=shoal.Asynchronous())
    # Nobody dies while many sessions share a few cores to decode a placement; the gaps between heartbeats are measured.
    flags = {"coordinator": ["--heartbeat-timeout", "60", "--heartbeat-interval", str(INTERVAL_S)]}
    with shoal.LocalCluster(servers=2, workers=0, flags=flags) as cluster, cluster.client() as client:
        client.submit(spec)
        address, began = cluster.address, time.monotonic()
        with members("sessions", address, workers, variables, processes=PROCESSES) as first:
            ready(first)
            while client.job(JOB).status().state is not shoal.JobState.PLACING:
                time.sleep(0.1)
            described_s = time.monotonic() - began
            coordinator = cluster.process("coordinator").pid
            time.sleep(2.0)
            since, used = time.monotonic(), cpu_s(coordinator)
            time.sleep(seconds)
            until, used = time.monotonic(), cpu_s(coordinator) - used
            with members("sessions", address, 1, variables, processes=1, first=workers) as one_more:
                ready(one_more)
                last = time.monotonic()
                for process in (sessions := [*first, *one_more]):
                    process.send(f"{since} {until}")
                found = [process.answer() for process in sessions]
    failures = [failure for it in found for failure in it["failures"]]
    assert not failures, failures[0]
    return {
        "name": "workers_that_wait_for_one_more",
        "workers": workers,
        "variables": variables,
        "describe_all_s": described_s,
        "coordinator_cores": used / (until - since),
        "longest_heartbeat_gap_s": max(it["gap_s"] for it in found[:-1]),
        "all_train_after_s": max(it["trained_at"] for it in found) - last,
        "load": os.getloadavg()[0],
    }


def misses(measured: dict[str, Any]) -> list[str]:
    """Returns the targets that are missed, in words."""
    return [f"{name} at most {limit:g}" for name, limit in MOST.items() if measured[name] > limit]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="wait 5 s with 8 workers and 1,000 variables")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of the measurement (default: 60)")
    options = parser.parse_args()
    row = measure(8, 1_000, 5.0) if options.short else measure(40, 10_000, options.seconds)
    missed = misses(row)
    print(json.dumps({**row, "missed": missed}))
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
