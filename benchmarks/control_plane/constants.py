"""What a step costs a server and a worker: constants of the scale model, measured with real processes.

A real server, or several, and one session in a process of its own, over lanes (TCP). Processor seconds are counted,
not time, so that other load on the machine changes them little. The session pushes gradients that are there already:
nothing is computed. `scale` calls `data_plane`; alone, `constants.py` prints the same as a JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from simulation import cpu_s

import shoal

# Bytes of a small model, whose steps show the cost of a call, and of a large one, whose steps show the cost of a byte.
SMALL_BYTES, LARGE_BYTES = 170_000, 100_000_000
VARIABLES = 10
_STEP_S = 3.0
_JOB = "constants"


def data_plane(*, short: bool = False) -> dict[str, Any]:
    """Measures all cases.

    Returns:
        By case, processor seconds of a server for a pull and for a push (of one server, one call each), and of the
        worker, and the bytes of a call.
    """
    cases = {
        "small_asynchronous": (SMALL_BYTES, 1, False),
        "small_synchronous": (SMALL_BYTES, 1, True),
        # With two servers a push is staged on both, and then committed.
        "small_two_servers": (SMALL_BYTES, 2, False),
        "large_asynchronous": (LARGE_BYTES, 1, False),
        "large_synchronous": (LARGE_BYTES, 1, True),
    }
    return {name: _case(*case, short=short) for name, case in cases.items()}


def _case(size: int, servers: int, synchronous: bool, *, short: bool) -> dict[str, float]:
    """Runs a case in a process of its own, whose processor time is the worker's."""
    command = [sys.executable, __file__, "--case", str(size), str(servers), str(int(synchronous))]
    environment = {**os.environ, "SHOAL_TRANSPORT": "tcp"}
    done = subprocess.run(
        [*command, *(["--short"] if short else [])], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(size: int, servers: int, synchronous: bool, seconds: float) -> dict[str, float]:
    """Pulls for some time, then pulls and pushes. The difference is a push."""
    variables = {f"w{number}": shoal.Variable((size // 4 // VARIABLES,)) for number in range(VARIABLES)}
    gradients = {name: np.full(it.shape, 1e-6, np.float32) for name, it in variables.items()}
    mode = shoal.Synchronous() if synchronous else shoal.Asynchronous()
    with (
        shoal.LocalCluster(servers=servers, workers=0) as cluster,
        cluster.client() as client,
        client.session(
            _JOB,
            variables=variables,
            optimizer=shoal.optim.SGD(1e-3),
            consistency=mode,
            shards=servers,
            overlap=False,
        ) as session,
    ):
        processes = [cluster.process("server", number).pid for number in range(servers)]

        def step() -> None:
            session.pull()
            session.push(gradients)

        whole = _costs(processes, step, seconds)
        # In synchronous mode a second pull of a step would wait for a push: a pull costs what it does otherwise.
        pull = None if synchronous else _costs(processes, lambda: session.pull() and None, seconds)
        session.settle()
    found = {"bytes": float(sum(array.nbytes for array in gradients.values())), "servers": float(servers)}
    for role in ("server", "worker"):
        found[f"{role}_step_s"] = whole[role]
        if pull:
            found[f"{role}_pull_s"] = pull[role]
            found[f"{role}_push_s"] = max(0.0, whole[role] - pull[role])
    return found


def _costs(servers: list[int], call: Callable[[], None], seconds: float) -> dict[str, float]:
    """Returns the processor seconds of one server and of this process for a call."""
    for _ in range(3):
        call()
    times = 0
    before, own, began = sum(map(cpu_s, servers)), time.process_time(), time.monotonic()
    while time.monotonic() - began < seconds or times < 3:
        call()
        times += 1
    own, used = time.process_time() - own, sum(map(cpu_s, servers)) - before
    return {"server": used / times / len(servers), "worker": own / times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs=3, type=int, metavar=("BYTES", "SERVERS", "SYNCHRONOUS"), help="internal")
    parser.add_argument("--short", action="store_true", help="measure briefly")
    options = parser.parse_args()
    if options.case:
        size, servers, synchronous = options.case
        print(json.dumps(measure(size, servers, bool(synchronous), 0.2 if options.short else _STEP_S)))
    else:
        print(json.dumps(data_plane(short=options.short)))


if __name__ == "__main__":
    shoal.tune_allocator()
    sys.path.append(str(Path(__file__).resolve().parent))
    main()
