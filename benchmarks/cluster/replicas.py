"""The dense step with and without a backup, by turns: python benchmarks/cluster/replicas.py [--short].

One process has a session of a job with one copy of its shards, and a session of a job with two copies, in one cluster
of two servers. The shards of each job are on one server. It takes some steps in the one, then as many in the other,
many times. The script prints one JSON line: milliseconds of a step with two copies, and the median ratio of
the turns.
"""

import argparse
import json
import statistics
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import shoal

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    shoal.tune_allocator()  # before NumPy and gRPC are loaded: later it does less

import numpy as np
from peers import workload as wl

_TURNS, _STEPS, _WARM_UP = 20, 5, 10


def session(client: shoal.Client, stack: ExitStack, copies: int) -> shoal.Session:
    """Opens a session of a job with so many copies of its shards. It ends with the stack."""
    variables = {f"v{number:05}": shoal.Variable(shape) for number, shape in enumerate(wl.shapes("dense"))}
    opened = stack.enter_context(
        client.session(
            f"copies-{copies}",
            variables=variables,
            optimizer=shoal.optim.SGD(1e-3),
            consistency=shoal.Synchronous(),
            shards=1,
            replicas=copies,
        )
    )
    job = client.job(f"copies-{copies}")
    while copies > 1 and job.status().copies < copies:
        time.sleep(0.05)
    return opened


def seconds_of(trained: shoal.Session, steps: int) -> float:
    """Returns the seconds of a step, over some steps."""
    began = time.perf_counter()
    for _ in range(steps):
        values = trained.pull()
        trained.push({name: w * np.float32(1e-6) + np.float32(1e-3) for name, w in values.items()})
    return (time.perf_counter() - began) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figure means nothing")
    turns, steps, warm_up = (2, 1, 1) if parser.parse_args().short else (_TURNS, _STEPS, _WARM_UP)
    with ExitStack() as stack:
        cluster = stack.enter_context(shoal.LocalCluster(servers=2, workers=0))
        client = stack.enter_context(cluster.client())
        measured = [partial(seconds_of, session(client, stack, copies)) for copies in (1, 2)]
        for measure in measured:
            measure(warm_up)
        pairs = []
        for turn in range(turns):
            order = measured if turn % 2 else measured[::-1]  # neither always comes after the other
            taken = {measure: measure(steps) for measure in order}
            pairs.append((taken[measured[0]], taken[measured[1]]))
    ratio = statistics.median(two / one for one, two in pairs)
    print(json.dumps({"ms_per_step": statistics.median(two for _, two in pairs) * 1e3, "ratio": ratio}))


if __name__ == "__main__":
    main()
