"""Shoal on the small-cluster workload of the peers: python benchmarks/cluster/small_cluster.py [--overlap] [--short].

There are two servers and two workers. Each worker is a session in a process of its own, and both train one asynchronous
job. This process tells each worker how many steps to take, and measures the time until both have taken them. The peer's
script (peers/tensorflow_ps.py) measures in the same way. This script prints one JSON line.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import shoal

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    shoal.tune_allocator()  # before NumPy and gRPC are loaded: later it does less

import numpy as np
from peers import workload as wl

JOB, KIND = "small-cluster", "small_cluster"
WORKERS, SERVERS = 2, 2
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Worker:
    """A worker process, which takes as many steps as it is told to."""

    process: "subprocess.Popen[str]"

    def tell(self, steps: int) -> None:
        """Tells the worker to take some steps, and does not wait for them."""
        assert self.process.stdin
        print(steps, file=self.process.stdin, flush=True)

    def wait(self) -> None:
        """Waits until the worker has taken its steps, or at first until it is ready."""
        assert self.process.stdout
        if self.process.stdout.readline() != "done\n":
            sys.exit("a worker ended; its reason is above")


@contextmanager
def workers(address: str, overlap: bool) -> Iterator[list[Worker]]:
    """Starts two workers and waits until their sessions are open."""
    command = [sys.executable, __file__, "--worker", address, *(["--overlap"] if overlap else [])]
    pipe = subprocess.PIPE
    started = [Worker(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)) for _ in range(WORKERS)]
    try:
        for worker in started:
            worker.wait()
        yield started
        for worker in started:
            worker.process.communicate(timeout=60)  # the end of its input ends it
    finally:
        for worker in started:
            worker.process.kill()
            worker.process.wait()


def train(address: str, overlap: bool) -> None:
    """Takes as many steps as each line of standard input says."""
    variables = {f"v{number}": shoal.Variable(shape) for number, shape in enumerate(wl.shapes(KIND))}
    with (
        shoal.connect(address) as client,
        client.session(
            JOB,
            variables=variables,
            workers=WORKERS,
            optimizer=shoal.optim.SGD(LEARNING_RATE),
            consistency=shoal.Asynchronous(),
            overlap=overlap,
        ) as session,
    ):
        print("done", flush=True)
        for line in sys.stdin:
            for _ in range(int(line)):
                values = session.pull()
                session.push({name: w * np.float32(1e-6) + np.float32(1e-3) for name, w in values.items()})
            session.settle()
            print("done", flush=True)


def measured(overlap: bool, short: bool) -> float:
    """Returns the seconds per step, where the steps of both workers count."""
    taken = 0
    with shoal.LocalCluster(servers=SERVERS, workers=0) as cluster, cluster.client() as client:
        with workers(cluster.address, overlap) as team:

            def run_steps(count: int) -> None:
                nonlocal taken
                shares = [count // WORKERS + (rank < count % WORKERS) for rank in range(WORKERS)]
                for worker, share in zip(team, shares, strict=True):
                    worker.tell(share)
                for worker in team:
                    worker.wait()
                taken += count

            seconds = wl.measure(run_steps, 1, 0.05) if short else wl.measure(run_steps)
        client.job(JOB).wait(timeout_s=60)
        expected = -LEARNING_RATE * 1e-3 * taken
        for name, value in client.pull(JOB).items():
            if not np.allclose(value, expected, rtol=0.02):
                sys.exit(f"{name} is {value.min():g} to {value.max():g} after {taken} steps; it should be {expected:g}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker", default="", metavar="ADDRESS", help="of the coordinator: be one of the workers")
    parser.add_argument("--overlap", action="store_true", help="pull and push while a gradient is computed")
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figure means nothing")
    options = parser.parse_args()
    if options.worker:
        train(options.worker, options.overlap)
        return
    seconds = measured(options.overlap, options.short)
    line = {"peer": "shoal", "workload": KIND, "ms_per_step": seconds * 1e3, "steps_per_s": 1 / seconds}
    print(json.dumps(line))


if __name__ == "__main__":
    main()
