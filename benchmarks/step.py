"""Shoal on the peers' workloads: python benchmarks/step.py dense|small [--no-overlap] [--one-by-one] [--shards 4] ...

There is one server and one worker. The worker is a session in this process. SHOAL_TRANSPORT selects the transport, as
for any session. With --no-overlap, the pull, the gradient and the push of a step come one after the other, as in the
peers' scripts. Without it, the push of one step and the pull of the next one run while the worker computes. The script
prints one JSON line, as the peers' scripts do.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import shoal

if __name__ == "__main__":
    shoal.tune_allocator()  # before NumPy and gRPC are loaded: later it does less

import numpy as np
from peers import workload as wl

from shoal._security import VARIABLES, AccessRole, role_name
from shoal._security.certificates import make_certificates

LEARNING_RATE = 1e-3
# Where segments of shared memory show in a process's map.
_SHARED = ("/dev/shm/", "/memfd:")


@dataclass
class Loop:
    """The worker's loop, and where its time went."""

    session: shoal.Session
    in_place: bool  # gradients are computed into the session's buffers
    one_by_one: bool  # gradients are computed while those before are pushed
    steps: int = 0
    ms: dict[str, list[float]] = field(default_factory=lambda: {"pull": [], "gradient": [], "push": []})  # by run

    def run_steps(self, count: int) -> None:
        """Takes some steps, and waits for them."""
        clock = time.perf_counter
        pull_s = compute_s = push_s = 0.0
        for _ in range(count):
            began = clock()
            values = self.session.pull()
            asked = pulled = clock()
            if self.in_place:
                whole: Any = self.session.buffers()
                push_s += clock() - pulled
                pulled = clock()
                for name, w in values.items():
                    np.multiply(w, np.float32(1e-6), out=whole[name])
                    whole[name] += np.float32(1e-3)
                del w
            else:
                whole = self._gradients(values)
            del values  # done with: to free ten thousand of them is no part of the next pull
            computed = clock()
            self.session.push(whole)
            push_s += clock() - computed
            compute_s += computed - pulled
            pull_s += asked - began
        # Values that have been fetched ahead are the next run's, as this one's first were the last one's.
        self.session.settle()
        self.steps += count
        for part, seconds in (("pull", pull_s), ("gradient", compute_s), ("push", push_s)):
            self.ms[part].append(seconds / count * 1e3)

    def _gradients(self, values: dict[str, np.ndarray]) -> Any:
        gradients = ((name, w * np.float32(1e-6) + np.float32(1e-3)) for name, w in values.items())
        return gradients if self.one_by_one else dict(gradients)

    def check(self) -> None:
        """Fails unless the values are those after so many steps from zeros. Steps in flight may be missing."""
        w = 0.0
        path = [0.0]
        for _ in range(self.steps):
            w -= LEARNING_RATE * (w * 1e-6 + 1e-3)
            path.append(w)
        low, high = path[-1] * 1.01, path[max(0, self.steps - 3)] * 0.99
        for name, value in self.session.pull().items():
            if not (low <= value.min() and value.max() <= high):
                sys.exit(
                    f"{name} is {value.min():g} to {value.max():g} after {self.steps} steps; "
                    f"it should be {low:g} to {high:g}"
                )


def main() -> None:
    options = _options()
    shapes = wl.shapes(options.workload) if options.variables is None else even_shapes(options.variables)
    variables = {f"v{number:05}": shoal.Variable(shape) for number, shape in enumerate(shapes)}
    with (
        tls_environment() if options.tls else plain_environment() as environment,
        shoal.LocalCluster(servers=1, workers=0, env=environment) as cluster,
        cluster.client() as client,
        client.session(
            options.workload,
            variables=variables,
            optimizer=shoal.optim.SGD(LEARNING_RATE),
            consistency=shoal.Synchronous() if options.synchronous else shoal.Asynchronous(),
            shards=options.shards,
            overlap=not options.no_overlap,
        ) as session,
    ):
        loop = Loop(session, options.in_place, options.one_by_one)
        seconds = wl.measure(loop.run_steps, 1, 0.05) if options.short else wl.measure(loop.run_steps)
        shared = _maps_shared_memory()
        loop.check()
    figure = {"gb_per_s": 2 * wl.DENSE_BYTES / seconds / 1e9} if options.workload == "dense" else {}
    figure |= {"ms_per_step": seconds * 1e3, "steps_per_s": 1 / seconds}
    parts = {f"ms_in_{part}": statistics.median(runs) for part, runs in loop.ms.items()}
    print(json.dumps({"peer": "shoal", "workload": options.workload, **figure, **parts, "shared_memory": shared}))


@contextlib.contextmanager
def plain_environment() -> Iterator[dict[str, str]]:
    yield {}


@contextlib.contextmanager
def tls_environment() -> Iterator[dict[str, str]]:
    """Makes certificates; yields the variables with which a process uses them."""
    with tempfile.TemporaryDirectory() as folder:
        # One certificate for all roles of this machine.
        make_certificates(Path(folder), [f"server={role_name(AccessRole.COORDINATOR)}"])
        names = ("ca.pem", "server.pem", "server-key.pem")
        yield {variable: f"{folder}/{name}" for variable, name in zip(VARIABLES, names, strict=True)}


def even_shapes(count: int) -> list[tuple[int]]:
    """Returns the shapes of vectors of nearly equal size, with the bytes of the dense workload in total."""
    least, more = divmod(wl.DENSE_BYTES // 4, count)
    return list(itertools.repeat((least + 1,), more)) + list(itertools.repeat((least,), count - more))


def _maps_shared_memory() -> bool:
    """Whether this process has mapped a segment. Otherwise the transport fell back to another one."""
    return any(name in line for line in Path("/proc/self/maps").read_text().splitlines() for name in _SHARED)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("workload", choices=("dense", "small"))
    parser.add_argument("--no-overlap", action="store_true")
    parser.add_argument("--in-place", action="store_true", help="compute gradients into the session's buffers")
    parser.add_argument("--one-by-one", action="store_true", help="push gradients as they are computed")
    parser.add_argument("--tls", action="store_true", help="TLS on all connections, with certificates of its own")
    parser.add_argument("--synchronous", action="store_true", help="synchronous mode, by default asynchronous")
    parser.add_argument("--shards", type=int, help="of the job; by default Shoal chooses")
    parser.add_argument("--variables", type=int, help="the dense workload's bytes in so many equal variables")
    parser.add_argument("--short", action="store_true", help="to see that it runs; the figure means nothing")
    return parser.parse_args()


if __name__ == "__main__":
    main()
