"""Strategies compared by real runs: python benchmarks/strategies/compare_strategies.py [PART ...] [--short] [--keep].

Four worker processes and a cluster of four servers run on this machine. A worker sleeps in each step, as if it
computed, so that a machine with few cores runs four workers at full speed. Then it computes the true gradient of a
small model.

The parts:

- strategies: loss against time and against samples, by strategy; all workers alike, and one of them five times slower.
- scaling: 1, 2 and 4 synchronous workers, with the same learning rate, with a rate scaled by the number of workers, and
  with a warm-up as well.
- servers: bytes and processor time of each server, for a larger model.

The script prints what it measures. `--keep` writes it to benchmarks/results/strategies.json, and renews the tables and
charts of docs/explanation/choosing-a-strategy.md (`strategies_page`).
"""

import argparse
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))

import machine
import strategies_page
from server_load import ServerLoad
from strategy_worker import BATCH, SERVERS

import shoal

WORKERS = 4
COMPUTE_S, SLOWED = 0.05, 5
RATE = 0.1  # of an update by one worker's batch
WARMUP_STEPS = 40
SECONDS, SHORT_SECONDS = 12.0, 0.5
_READY_S = 0.3  # from the last worker's word until all begin


@dataclass(frozen=True)
class Setting:
    """What one run does.

    Attributes:
        part: part of the benchmark.
        name: name of the strategy or case.
        mode: consistency mode; "" for workers that reduce gradients among themselves.
        workers: their number.
        group: number of workers in a group, which reduce their gradients among themselves.
        joined: number of workers whose gradients one update joins. The learning rate is proportional to it.
        slowed: whether the last worker is slower than the others.
        model: digits or large.
        shards: number of shards; 0 means the default.
        partitioned: whether large variables are cut.
        warmup_steps: updates of the warm-up.
    """

    part: str
    name: str
    mode: str
    workers: int = WORKERS
    group: int = 1
    joined: int = 1
    slowed: bool = False
    model: str = "digits"
    shards: int = 0
    partitioned: bool = False
    warmup_steps: int = 0


def settings() -> Iterator[Setting]:
    """Yields the settings of all runs."""
    for slowed in (False, True):
        yield Setting("strategies", "synchronous", "sync", joined=4, slowed=slowed)
        yield Setting("strategies", "synchronous, 1 backup worker", "sync:1", joined=3, slowed=slowed)
        yield Setting("strategies", "bounded staleness, 4 steps", "ssp:4", slowed=slowed)
        yield Setting("strategies", "asynchronous", "async", slowed=slowed)
        yield Setting("strategies", "ring, no servers", "", group=4, joined=4, slowed=slowed)
        yield Setting("strategies", "hybrid, groups of 2, asynchronous", "async", group=2, joined=2, slowed=slowed)
    for workers in (1, 2, 4):
        yield Setting("scaling", "same rate", "sync", workers)
        if workers > 1:
            yield Setting("scaling", "scaled rate", "sync", workers, joined=workers)
            yield Setting("scaling", "scaled rate, warm-up", "sync", workers, joined=workers, warmup_steps=WARMUP_STEPS)
    for shards in (1, 2, 4):
        yield Setting("servers", f"{shards} of 4 servers, whole variables", "async", model="large", shards=shards)
    cut: dict[str, Any] = {"model": "large", "shards": SERVERS, "partitioned": True}
    yield Setting("servers", "4 servers, cut variables", "async", **cut)
    yield Setting("servers", "4 servers, cut variables, groups of 2", "async", group=2, **cut)
    yield Setting("servers", "4 servers, cut variables, synchronous", "sync", **cut)
    yield Setting("servers", "ring, no servers", "", group=4, model="large")


class Team:
    """The worker processes."""

    def __init__(self) -> None:
        command = [sys.executable, str(Path(__file__).with_name("strategy_worker.py"))]
        pipe = subprocess.PIPE
        one_thread = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self._workers = [
            subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=one_thread) for _ in range(WORKERS)
        ]

    def run(self, setting: Setting, seconds: float, coordinator: str, load: "ServerLoad") -> dict[str, Any]:
        """Makes one run, and returns what it measured."""
        number = setting.workers
        job = f"run-{secrets.token_hex(4)}"
        for rank in range(number):
            slow = SLOWED if setting.slowed and rank == number - 1 else 1
            sessions = number // setting.group
            told = asdict(setting) | {"rank": rank, "rate": RATE * setting.joined, "seconds": seconds, "job": job}
            self._tell(rank, told | {"compute_s": COMPUTE_S * slow, "sessions": sessions, "coordinator": coordinator})
        addresses = [self._answer(rank)["address"] for rank in range(number)]
        token = secrets.token_hex(16)
        for rank in range(number):
            first = rank - rank % setting.group
            members = addresses[first : first + setting.group]
            self._tell(rank, {"addresses": members, "rank": rank - first, "token": token})
        for rank in range(number):
            self._answer(rank)
        with load.measured() as servers:
            begin = time.monotonic() + _READY_S
            for rank in range(number):
                self._tell(rank, {"begin": begin})
            found = [self._answer(rank) for rank in range(number)]
        steps = sorted((at, counts) for each in found for at, counts in each["steps"])
        return asdict(setting) | measured(steps, found[0]["losses"]) | {"seconds": seconds, "servers": servers}

    def _tell(self, rank: int, told: Mapping[str, Any]) -> None:
        stdin = self._workers[rank].stdin
        assert stdin
        print(json.dumps(told), file=stdin, flush=True)

    def _answer(self, rank: int) -> Any:
        stdout = self._workers[rank].stdout
        assert stdout
        if not (line := stdout.readline()):
            sys.exit(f"worker {rank} ended; its reason is above")
        return json.loads(line)

    def close(self) -> None:
        """Ends the processes."""
        for worker in self._workers:
            worker.kill()
            worker.communicate()


def measured(steps: Sequence[tuple[float, bool]], losses: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Returns the curve and the totals of a run.

    Args:
        steps: for each step of a worker, the time of its push and whether the push counts.
        losses: for each evaluation, its time and the loss.
    """
    counted = [at for at, counts in steps if counts]
    curve = [
        {"seconds": round(at, 3), "samples": BATCH * sum(it <= at for it in counted), "loss": round(loss, 4)}
        for at, loss in losses
    ]
    return {"curve": curve, "steps": len(steps), "counted": len(counted), "last_s": round(steps[-1][0], 3)}


@contextmanager
def team() -> Iterator[Team]:
    """Yields the worker processes, and ends them."""
    running = Team()
    try:
        yield running
    finally:
        running.close()


def main() -> int:
    """Runs the benchmark, and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="strategies, scaling or servers; default: all")
    parser.add_argument("--keep", action="store_true", help="write the results, and renew the page and its charts")
    parser.add_argument("--short", action="store_true", help="make short runs, whose results mean nothing")
    options = parser.parse_args()
    parts = options.parts or ["strategies", "scaling", "servers"]
    chosen = [it for it in settings() if it.part in parts]
    runs = []
    with shoal.LocalCluster(servers=SERVERS, workers=0) as cluster, team() as workers:
        load = ServerLoad(cluster)
        for setting in chosen:
            seconds = SHORT_SECONDS if options.short else SECONDS * (0.5 if setting.part == "servers" else 1)
            runs.append(workers.run(setting, seconds, cluster.address, load))
            print(strategies_page.told(runs[-1]), file=sys.stderr, flush=True)
    result = {"date": machine.now(), "machine": machine.described({}), "compute_s": COMPUTE_S, "slowed": SLOWED}
    result |= {"batch": BATCH, "runs": runs}
    print(json.dumps(result))
    if options.keep:
        strategies_page.keep(result, parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
