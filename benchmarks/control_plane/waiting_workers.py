"""Benchmark of sessions that wait for one more: python benchmarks/control_plane/waiting_workers.py [--short].

The job has 10,000 variables and needs 41 sessions. At first, 40 sessions enter it and wait. Each one sends its own
heartbeats by the real protocol. The sessions run in a few processes. For a minute, the script measures the
coordinator's CPU time, and the gaps between the replies to each session's heartbeats. Then the last session enters, and
each session pulls and pushes once.

The script prints one JSON line. Its exit status is 1 if a heartbeat was late, the coordinator used more than a fifth of
a core, or the sessions needed more than 5 s.
"""

import argparse
import itertools
import json
import logging
import os
import subprocess
import sys
import threading
import time
from typing import IO, Any

import numpy as np
import structlog

import shoal
from shoal import errors
from shoal._rpc import CoordinatorClient, MembershipClient
from shoal._training.participant import Participant
from shoal.v1 import coordinator_pb2

JOB = "waits"
PROCESSES = 4
MOST_CORES, MOST_START_S = 0.2, 5.0
# A heartbeat is late if the reply to it comes later than the next one is due.
INTERVAL_S, LATE_INTERVALS = 0.5, 2.0
PATIENCE_S = 120.0


class Waiter:
    """One session with its heartbeats; it waits for the job, and then makes one step."""

    def __init__(self, address: str, number: int, variables: dict[str, shoal.Variable]) -> None:
        self._variables = variables
        self._client = CoordinatorClient(address)
        self._replies: list[float] = []
        request = coordinator_pb2.RegisterRequest(role=coordinator_pb2.SESSION, member=f"waiter-{number}")
        self._membership = MembershipClient(self._client, request, on_reply=self._replied)
        self.described, self.error, self.trained_at = threading.Event(), "", 0.0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def longest_gap_s(self, since: float, until: float) -> float:
        """Returns the longest time without a reply to a heartbeat, in a period of the monotonic clock."""
        times = [since, *(it for it in self._replies if since < it < until), until]
        return max(later - earlier for earlier, later in itertools.pairwise(times))

    def end(self) -> None:
        """Waits for the step, and leaves the cluster."""
        self._thread.join(PATIENCE_S)
        self._membership.stop()
        self._client.close()

    def _replied(self, _: Any) -> None:
        self._replies.append(time.monotonic())

    def _run(self) -> None:
        try:
            self._membership.start()
            participant = Participant(self._client, JOB, self._membership.member, self._membership.incarnation)
            participant.describe(self._variables, 0)
            self.described.set()
            with participant.enter() as pipeline:
                pipeline.pull()
                pipeline.push({name: np.ones(it.shape, np.float32) for name, it in self._variables.items()})
                pipeline.settle()
            self.trained_at = time.monotonic()
        except errors.ShoalError as error:
            self.error = error.message
            self.described.set()


def run_waiters(address: str, first: int, count: int, variables: int) -> None:
    """Runs some sessions in this process, as the lines of its standard input say."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # stdout is the parent's
    described = {f"layer-{number}": shoal.Variable((4,)) for number in range(variables)}
    waiters = [Waiter(address, first + number, described) for number in range(count)]
    for waiter in waiters:
        waiter.described.wait(PATIENCE_S)
    print("described", flush=True)
    since, until = map(float, sys.stdin.readline().split())
    gap_s = max(waiter.longest_gap_s(since, until) for waiter in waiters)
    for waiter in waiters:
        waiter.end()
    failures = [waiter.error for waiter in waiters if waiter.error]
    trained_at = max(waiter.trained_at for waiter in waiters)
    print(json.dumps({"gap_s": gap_s, "trained_at": trained_at, "failures": failures}), flush=True)


def start_waiters(address: str, first: int, count: int, variables: int) -> "subprocess.Popen[str]":
    arguments = [address, str(first), str(count), str(variables)]
    return subprocess.Popen(
        [sys.executable, __file__, "--waiters", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def stream(found: "IO[str] | None") -> "IO[str]":
    assert found is not None
    return found


def cpu_s(pid: int) -> float:
    """Returns the CPU time of a process, in seconds."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(workers: int, variables: int, seconds: float) -> dict[str, Any]:
    spec = shoal.Job(name=JOB, workers=workers + 1, consistency=shoal.Asynchronous())
    # Nobody dies while many sessions share a few cores to decode a placement; the gaps between heartbeats are measured.
    flags = {"coordinator": ["--heartbeat-timeout", "60", "--heartbeat-interval", str(INTERVAL_S)]}
    with shoal.LocalCluster(servers=2, workers=0, flags=flags) as cluster, cluster.client() as client:
        client.submit(spec)
        share = -(-workers // PROCESSES)
        firsts = range(0, workers, share)
        processes = [start_waiters(cluster.address, first, min(share, workers - first), variables) for first in firsts]
        began = time.monotonic()
        for process in processes:
            assert stream(process.stdout).readline() == "described\n"
        while client.job(JOB).status().state is not shoal.JobState.PLACING:
            time.sleep(0.1)
        described_s = time.monotonic() - began
        coordinator = cluster.process("coordinator").pid
        time.sleep(2.0)
        since, used = time.monotonic(), cpu_s(coordinator)
        time.sleep(seconds)
        until, used = time.monotonic(), cpu_s(coordinator) - used
        processes.append(start_waiters(cluster.address, workers, 1, variables))
        assert stream(processes[-1].stdout).readline() == "described\n"
        last = time.monotonic()
        for process in processes:
            stream(process.stdin).write(f"{since} {until}\n")
            stream(process.stdin).flush()
        found = [json.loads(stream(process.stdout).readline()) for process in processes]
        for process in processes:
            process.communicate()
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="wait 5 s with 8 workers and 1,000 variables")
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds of the measurement (default: 60)")
    parser.add_argument("--waiters", nargs=4, metavar=("ADDRESS", "FIRST", "COUNT", "VARIABLES"), help="internal")
    options = parser.parse_args()
    if options.waiters:
        address, *numbers = options.waiters
        first, count, variables = map(int, numbers)
        run_waiters(address, first, count, variables)
        return 0
    row = measure(8, 1_000, 5.0) if options.short else measure(40, 10_000, options.seconds)
    print(json.dumps(row))
    late = row["longest_heartbeat_gap_s"] > LATE_INTERVALS * INTERVAL_S
    return 1 if late or row["coordinator_cores"] > MOST_CORES or row["all_train_after_s"] > MOST_START_S else 0


if __name__ == "__main__":
    sys.exit(main())
