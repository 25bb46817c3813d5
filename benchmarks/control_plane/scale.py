"""Benchmark of the control plane with many members: python benchmarks/control_plane/scale.py [--workers N] ...

The coordinator is real and runs in a process of its own. Its members are simulated (`members`): they register, enter
one job, send heartbeats and report. The script measures three things: the coordinator's processor time while all
workers train, the time until the last worker learns that its job was cancelled, and the time until a killed worker is
declared lost. It prints one JSON line. Its exit status is 1 if a result misses its target. `--keep` writes the line to
benchmarks/results/scale.json.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import shoal
from shoal.status import JobState

HERE = Path(__file__).resolve().parent
RESULT = HERE.parent / "results" / "scale.json"
# Targets for 1,000 workers and a heartbeat timeout of 10 s: cores, and seconds.
CORES, CANCEL_S, DEAD_AFTER_TIMEOUT_S = 0.3, 3.0, 1.0
PATIENCE_S = 300.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Scale:
    """What is run.

    Attributes:
        workers, servers: numbers of simulated members.
        processes: over which the workers are divided.
        heartbeat_timeout_s: the heartbeat timeout, in seconds.
        interval_s: the heartbeat interval of a small cluster, in seconds.
        measured_s: for how long the processor time is measured, in seconds.
    """

    workers: int = 1_000
    servers: int = 1
    processes: int = 4
    heartbeat_timeout_s: float = 10.0
    interval_s: float = 0.5
    measured_s: float = 30.0


class Members:
    """A process of simulated members. `stop` ends it; the members then leave.

    Args:
        kind: "worker" or "server".
        address: the coordinator's.
        first: number of the first member.
        count: number of members.
    """

    def __init__(self, kind: str, address: str, first: int, count: int) -> None:
        command = [sys.executable, str(HERE / "members.py"), kind, address, str(first), str(count)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def send(self, command: str) -> None:
        """Sends a command."""
        assert self._process.stdin
        print(command, file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """Returns the answer to the oldest command without one. The first answer says that all are registered."""
        assert self._process.stdout
        for text in self._process.stdout:  # logs may be among them
            if text.startswith("{"):
                line: dict[str, Any] = json.loads(text)
                return line
        raise SystemExit("simulated members have ended")

    def kill(self) -> None:
        """Kills the process: its members fall silent."""
        self._process.kill()

    def stop(self) -> None:
        """Ends the process."""
        self._process.communicate()


@contextmanager
def members(kind: str, address: str, first: int, count: int) -> Iterator[Members]:
    """Runs a process of simulated members."""
    process = Members(kind, address, first, count)
    try:
        yield process
    finally:
        process.stop()


def cpu_s(pid: int) -> float:
    """Returns the processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def ask(processes: list[Members], command: str = "count") -> dict[str, Any]:
    """Sends a command to all processes at once, and returns their answers, added up or the largest."""
    for process in processes:
        process.send(command)
    answers = [process.answer() for process in processes]
    largest = {"interval_s", "learned_at"}
    return {key: (max if key in largest else sum)(each[key] for each in answers) for key in answers[0]}


def wait_for(condition: Callable[[], bool], what: str, every_s: float = 0.1) -> None:
    """Waits until a condition is met."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"not within {PATIENCE_S:g} s: {what}")
        time.sleep(every_s)


def run(scale: Scale) -> dict[str, Any]:
    """Returns the metrics of one run."""
    flags = ["--heartbeat-timeout", str(scale.heartbeat_timeout_s), "--heartbeat-interval", str(scale.interval_s)]
    with ExitStack() as stack:
        cluster = stack.enter_context(
            shoal.LocalCluster(servers=0, workers=0, page_listen="", flags={"coordinator": flags})
        )
        client = stack.enter_context(cluster.client())
        pid = cluster.process("coordinator").pid
        server = stack.enter_context(members("server", cluster.address, 0, scale.servers))
        server.answer()
        began = time.monotonic()
        shares = [scale.workers * part // scale.processes for part in range(scale.processes + 1)]
        workers = [
            stack.enter_context(members("worker", cluster.address, first, last - first))
            for first, last in pairwise(shares)
        ]
        for process in workers:
            process.answer()
        registered_s = time.monotonic() - began
        job = shoal.Job(
            "simulated:job", name="scale", workers=scale.workers, consistency=shoal.consistency.Asynchronous()
        )
        began = time.monotonic()
        handle = client.submit(job)
        ask(workers, "enter")
        wait_for(lambda: handle.status().state is JobState.RUNNING, "all workers are admitted")
        entered_s = time.monotonic() - began
        time.sleep(2 * ask(workers)["interval_s"])  # until all have heard the interval, and calls are spread
        measured = _training(scale, workers, pid)
        alive = len(client.status().alive(shoal.status.Role.WORKER))
        cancelled_at = time.monotonic()
        handle.cancel()
        wait_for(lambda: ask(workers)["learned"] == scale.workers, "all workers have learned of the end")
        learned_s = ask(workers)["learned_at"] - cancelled_at
        return {
            "workers": scale.workers,
            "servers": scale.servers,
            "heartbeat_timeout_s": scale.heartbeat_timeout_s,
            **measured,
            "registered_s": round(registered_s, 2),
            "entered_s": round(entered_s, 2),
            "declared_lost": scale.workers - alive + ask(workers)["lives"] - scale.workers,
            "cancel_s": round(learned_s, 2),
            "dead_s": round(_death(scale, client, cluster.address), 2),
        }


def _training(scale: Scale, workers: list[Members], pid: int) -> dict[str, Any]:
    """Measures the coordinator while all workers train."""
    before, used = ask(workers), cpu_s(pid)
    began = time.monotonic()
    time.sleep(scale.measured_s)
    seconds = time.monotonic() - began
    used = cpu_s(pid) - used
    after = ask(workers)
    calls = {kind: after[kind] - before[kind] for kind in ("heartbeats", "reports")}
    return {
        "interval_s": round(after["interval_s"], 3),
        "calls_per_s": round(sum(calls.values()) / seconds, 1),
        "heartbeats_per_s": round(calls["heartbeats"] / seconds, 1),
        "coordinator_cores": round(used / seconds, 3),
        "us_per_call": round(1e6 * used / max(1, sum(calls.values()))),
        "steps_reported": after["steps"],
    }


def _death(scale: Scale, client: shoal.Client, address: str) -> float:
    """Kills a worker, and returns the seconds until it is declared lost."""
    with members("worker", address, scale.workers, 1) as victim:
        victim.answer()
        killed_at = time.monotonic()
        victim.kill()
        name = f"worker-{scale.workers}"
        wait_for(lambda: any(it.member == name and not it.alive for it in client.status().members), "a death", 0.05)
    return time.monotonic() - killed_at


def misses(measured: dict[str, Any], scale: Scale) -> list[str]:
    """Returns the targets that are missed, in words."""
    checks = {
        f"coordinator_cores at most {CORES}": measured["coordinator_cores"] <= CORES,
        f"cancel_s at most {CANCEL_S:g}": measured["cancel_s"] <= CANCEL_S,
        f"dead_s at most {scale.heartbeat_timeout_s + DEAD_AFTER_TIMEOUT_S:g}": measured["dead_s"]
        <= scale.heartbeat_timeout_s + DEAD_AFTER_TIMEOUT_S,
        "declared_lost 0": measured["declared_lost"] == 0,
    }
    return [target for target, met in checks.items() if not met]


def main() -> int:
    """Runs the benchmark, and returns its exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in Scale().__dict__.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--keep", action="store_true", help="write the metrics to benchmarks/results/scale.json")
    options = vars(parser.parse_args())
    keep = options.pop("keep")
    scale = Scale(**options)
    measured = run(scale)
    machine = {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 1), "python": platform.python_version()}
    line = {**measured, "missed": misses(measured, scale), "machine": machine}
    print(json.dumps(line))
    if keep:
        RESULT.write_text(json.dumps(line, indent=2) + "\n")
    return bool(line["missed"])


if __name__ == "__main__":
    sys.exit(main())
