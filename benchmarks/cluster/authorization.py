"""The small step with and without tokens, by turns: python benchmarks/cluster/authorization.py [--short].

One process has a session in a cluster that asks for tokens, as by default, and a session in a cluster with
`--insecure`. It takes some steps in the one, then as many in the other, many times. The turns are so short that a
change of the machine's speed affects both. Two processes of one kind differ by a few per cent, so a result of one run
means little: take the median of several. The script prints one JSON line: steps a second with tokens, and the median
ratio of the turns.
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

_LEARNING_RATE = 1e-3
_TURNS, _STEPS, _WARM_UP = 60, 150, 300


def session(stack: ExitStack, *, insecure: bool) -> shoal.Session:
    """Starts a cluster of one server, and opens a session in it. Both end with the stack."""
    cluster = shoal.LocalCluster(servers=1, workers=0, env={"SHOAL_INSECURE": "1"} if insecure else {})
    client = stack.enter_context(stack.enter_context(cluster).client())
    variables = {f"v{number:05}": shoal.Variable(shape) for number, shape in enumerate(wl.shapes("small"))}
    return stack.enter_context(
        client.session(
            "small",
            variables=variables,
            optimizer=shoal.optim.SGD(_LEARNING_RATE),
            consistency=shoal.Asynchronous(),
            overlap=False,
        )
    )


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
    turns, steps, warm_up = (2, 2, 2) if parser.parse_args().short else (_TURNS, _STEPS, _WARM_UP)
    with ExitStack() as stack:
        measured = [partial(seconds_of, session(stack, insecure=insecure)) for insecure in (False, True)]
        for measure in measured:
            measure(warm_up)
        pairs = []
        for turn in range(turns):
            order = measured if turn % 2 else measured[::-1]  # neither always comes after the other
            taken = {measure: measure(steps) for measure in order}
            pairs.append((taken[measured[0]], taken[measured[1]]))
    ratio = statistics.median(insecure / closed for closed, insecure in pairs)
    print(json.dumps({"steps_per_s": 1 / statistics.median(closed for closed, _ in pairs), "ratio": ratio}))


if __name__ == "__main__":
    main()
