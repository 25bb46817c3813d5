"""Benchmark of a server's processor time for a small step, with 1 and with 16 shards.

python benchmarks/server/small_step.py [--short]

A session in this process trains an asynchronous job of 32 variables of 312 float32 on one real server, over lanes
(TCP). A step is a pull and a push. There is a job for each number of shards. The jobs take their steps by turns, so
that other load on the machine changes both alike. To compare two versions of Shoal, run the script by turns in a
worktree of each.

The script prints one JSON line: for each number of shards, the median, the least and the most of the turns, in
milliseconds of all threads of the server for a step; and the ratio of the medians of 16 shards and 1.
"""

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path

import shoal

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1] / "control_plane"))
    shoal.tune_allocator()  # before NumPy and gRPC are loaded: later it does less

import numpy as np
from simulated_members import cpu_s

SHARDS = (1, 16)
VARIABLES, ELEMENTS = 32, 312
_WARM_UP_STEPS = 50


def measured(turns: int, steps: int) -> dict[int, list[float]]:
    """Returns the milliseconds of a step in each turn, by the number of shards.

    Args:
        turns: turns of each job.
        steps: steps of a turn.
    """
    variables = {f"w{number}": shoal.Variable((ELEMENTS,)) for number in range(VARIABLES)}
    gradients = {name: np.full(it.shape, 1e-6, np.float32) for name, it in variables.items()}
    found: dict[int, list[float]] = {shards: [] for shards in SHARDS}
    with (
        shoal.LocalCluster(servers=1, workers=0, env={"SHOAL_TRANSPORT": "tcp"}) as cluster,
        cluster.client() as client,
        ExitStack() as stack,
    ):
        server = cluster.process("server").pid
        sessions = {
            shards: stack.enter_context(
                client.session(
                    f"shards-{shards}",
                    variables=variables,
                    workers=1,
                    optimizer=shoal.optim.SGD(1e-3),
                    consistency=shoal.Asynchronous(),
                    shards=shards,
                    overlap=False,
                )
            )
            for shards in SHARDS
        }

        def step(session: shoal.Session, count: int) -> float:
            before = cpu_s(server)
            for _ in range(count):
                session.pull()
                session.push(gradients)
            return cpu_s(server) - before

        for session in sessions.values():
            step(session, _WARM_UP_STEPS)
        for _ in range(turns):
            for shards, session in sessions.items():
                found[shards].append(1e3 * step(session, steps) / steps)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figures mean nothing")
    short = parser.parse_args().short
    found = measured(1 if short else 5, 50 if short else 4_000)
    medians = {shards: statistics.median(values) for shards, values in found.items()}
    line = {
        f"shards_{shards}_ms": [round(value, 3) for value in (medians[shards], min(values), max(values))]
        for shards, values in found.items()
    }
    print(json.dumps({"name": "small_step", **line, "ratio": round(medians[SHARDS[-1]] / medians[SHARDS[0]], 3)}))


if __name__ == "__main__":
    main()
