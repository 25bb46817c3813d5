"""Constants of the scale model: what a step costs a server and a worker, measured with real processes.

One or two workers train with one or two real servers over lanes (TCP). The workers are sessions in a process of their
own. They push constant gradients and compute nothing. The module counts processor seconds, not time, so that other load
on the machine changes them little.

`scale` calls `data_plane`. As a script, `constants.py` prints what `data_plane` returns as one JSON line.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from threading import Barrier

import numpy as np
from simulated_members import cpu_s

import shoal

# Bytes of a small model, whose steps show the cost of a call, and of a large one, whose steps show the cost of a byte.
SMALL_BYTES, LARGE_BYTES = 170_000, 100_000_000
VARIABLES = 10
ROUNDS = 3
_JOB = "constants"
_WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Workload:
    """What a case runs.

    Attributes:
        size: bytes of the model.
        servers, workers: their numbers.
        steps: steps of each worker that are measured.
        synchronous: whether the job is synchronous.
    """

    size: int
    servers: int
    workers: int
    steps: int
    synchronous: bool


CASES = {
    "small_asynchronous": Workload(SMALL_BYTES, 1, 1, 2_000, synchronous=False),
    # With two workers, the server adds up their gradients.
    "small_synchronous": Workload(SMALL_BYTES, 1, 2, 1_000, synchronous=True),
    # With two servers, a push is staged on both, and then committed.
    "small_two_servers": Workload(SMALL_BYTES, 2, 1, 1_000, synchronous=False),
    "large_asynchronous": Workload(LARGE_BYTES, 1, 1, 30, synchronous=False),
    "large_synchronous": Workload(LARGE_BYTES, 1, 2, 15, synchronous=True),
}


def data_plane() -> dict[str, dict[str, float]]:
    """Measures all cases, by turns.

    Returns:
        By case, medians of the processor seconds of one server and of one worker for a step, and for its pull and its
        push if the job is asynchronous; and the bytes that are pulled and pushed.
    """
    rounds = [{name: _run(name) for name in CASES} for _ in range(ROUNDS)]
    return {
        name: {key: statistics.median(found[name][key] for found in rounds) for key in rounds[0][name]}
        for name in CASES
    }


def _run(name: str) -> dict[str, float]:
    """Runs a case in a process of its own, whose processor time is the workers'."""
    command = [sys.executable, __file__, "--case", name]
    environment = {**os.environ, "SHOAL_TRANSPORT": "tcp"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(case: Workload) -> dict[str, float]:
    """Takes steps, and then pulls alone if the job is asynchronous. The difference is a push."""
    variables = {f"w{number}": shoal.Variable((case.size // 4 // VARIABLES,)) for number in range(VARIABLES)}
    gradients = {name: np.full(it.shape, 1e-6, np.float32) for name, it in variables.items()}
    marks: list[tuple[float, float]] = []  # of the servers and of this process, between the parts

    with shoal.LocalCluster(servers=case.servers, workers=0) as cluster, cluster.client() as client:
        servers = [cluster.process("server", number).pid for number in range(case.servers)]
        barrier = Barrier(case.workers, lambda: marks.append((sum(map(cpu_s, servers)), time.process_time())))

        def work() -> None:
            try:
                with client.session(
                    _JOB,
                    variables=variables,
                    workers=case.workers,
                    optimizer=shoal.optim.SGD(1e-3),
                    consistency=shoal.Synchronous() if case.synchronous else shoal.Asynchronous(),
                    shards=case.servers,
                    overlap=False,
                ) as session:
                    _take_part(session, case, gradients, barrier)
            except BaseException:
                barrier.abort()
                raise

        with ThreadPoolExecutor(case.workers) as threads:
            for worker in [threads.submit(work) for _ in range(case.workers)]:
                worker.result()

    count = case.steps * case.workers
    (before, own_before), (after, own), *pulled = marks
    found = {"bytes": float(sum(array.nbytes for array in gradients.values())), "servers": float(case.servers)}
    found["server_step_s"], found["worker_step_s"] = (after - before) / count / case.servers, (own - own_before) / count
    for last, last_own in pulled:
        found["server_pull_s"], found["worker_pull_s"] = (last - after) / count / case.servers, (last_own - own) / count
        for role in ("server", "worker"):
            found[f"{role}_push_s"] = max(0.0, found[f"{role}_step_s"] - found[f"{role}_pull_s"])
    return found


def _take_part(session: shoal.Session, case: Workload, gradients: dict[str, np.ndarray], barrier: Barrier) -> None:
    for _ in range(_WARM_UP_STEPS):
        session.pull()
        session.push(gradients)
    barrier.wait()
    for _ in range(case.steps):
        session.pull()
        session.push(gradients)
    session.settle()
    barrier.wait()
    if not case.synchronous:  # where a second pull would wait for a push
        for _ in range(case.steps):
            session.pull()
        barrier.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES, help="measure one case in this process")
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figures mean nothing")
    options = parser.parse_args()
    if options.case:
        case = CASES[options.case]
        print(json.dumps(measure(replace(case, steps=case.steps // 10) if options.short else case)))
    else:
        print(json.dumps(data_plane()))


if __name__ == "__main__":
    shoal.tune_allocator()
    main()
