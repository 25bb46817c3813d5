"""Benchmark of the optimizers' kernels, compared with torch's fused ones: python benchmarks/kernels.py [--json FILE].

Shoal and torch each update 16 M float32 parameters on one thread, and take turns. The interpreter that SHOAL_PEER_TORCH
names (`SHOAL_PEER_TORCH=/path/to/python`) runs torch in a process of its own. If the variable is not set, the script
measures only Shoal.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from shoal import optim
from shoal_server.optimizers import arrays, kernel_threads, kernels, update_rules

PEER = "SHOAL_PEER_TORCH"
SCRIPT = Path(__file__).parent / "peers" / "torch_kernels.py"
ELEMENTS = 16_000_000
LEAST_ROUNDS = 7  # each takes some 10 ms
LEARNING_RATE = 1e-3
OPTIMIZERS = (optim.SGD, optim.Adagrad, optim.Adam, optim.AdamW)


def rows(rounds: int = 9, torch: str | None = None) -> list[dict[str, Any]]:
    """Returns one row of medians for each optimizer. A `ratio` above 1 means that Shoal is faster.

    Args:
        rounds: of each; at least 7 are made.
        torch: the peer's interpreter, "" for none; by default as the environment says.
    """
    interpreter = os.environ.get(PEER, "") if torch is None else torch
    kernels.warm_up()
    with torch_peer(interpreter) as peer, one_thread():
        return [row(optimizer, max(rounds, LEAST_ROUNDS), peer) for optimizer in OPTIMIZERS]


def row(optimizer: type[optim.Optimizer], rounds: int, peer: "Peer | None") -> dict[str, Any]:
    update = updates(optimizer(LEARNING_RATE))
    ours, theirs = [], []
    for _ in range(1 + rounds):  # the first does not count
        ours.append(update())
        if peer:
            theirs.append(peer.update(optimizer.__name__))
    our_speed, their_speed = speed(ours), speed(theirs) if peer else None
    return {
        "name": f"kernel_{optimizer.__name__.lower()}",
        "ours": our_speed,
        "unit": "M parameters/s",
        "peer": peer.name if peer else "",
        "theirs": their_speed,
        "ratio": our_speed / their_speed if their_speed else None,
    }


def speed(seconds: list[float]) -> float:
    return ELEMENTS / statistics.median(seconds[1:]) / 1e6


def updates(optimizer: optim.Optimizer) -> Callable[[], float]:
    """Returns a function that makes one update of an arena and returns the seconds that it took."""
    rule = update_rules.rule_for(optimizer)
    setting_ranges = update_rules.setting_ranges_for([("w", ELEMENTS)], optimizer)
    chance = np.random.default_rng(0)
    values, gradient = (arrays.empty(ELEMENTS, np.float32) for _ in range(2))
    for array in (values, gradient):
        chance.standard_normal(dtype=np.float32, out=array)
    slots = {slot: arrays.full(ELEMENTS, rule.initial(slot), np.float32) for slot in rule.slots}
    version = 0

    def update() -> float:
        nonlocal version
        start = time.perf_counter()
        rule.apply(values, gradient, slots, version=version, lr_scale=1.0, setting_ranges=setting_ranges)
        version += 1
        return time.perf_counter() - start

    return update


class Peer:
    """torch in a process of its own, which makes an update for each command."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        self.name = self._line()

    def update(self, optimizer: str) -> float:
        """Makes one update, and returns the seconds that it took."""
        assert self._process.stdin
        print("go", optimizer, file=self._process.stdin, flush=True)
        return float(self._line())

    def _line(self) -> str:
        assert self._process.stdout
        if not (line := self._process.stdout.readline()):
            raise RuntimeError(f"{SCRIPT.name} ended with status {self._process.wait()}; its errors are above")
        return line.strip()


@contextmanager
def torch_peer(interpreter: str) -> Iterator[Peer | None]:
    """Yields the peer, or None if there is no interpreter with torch."""
    if not interpreter:
        yield None
        return
    command = [interpreter, str(SCRIPT), str(ELEMENTS), str(LEARNING_RATE)]
    # Its standard input ends with the block, and so does it.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Peer(process)


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits the kernels to the calling thread inside the `with` block."""
    with mock.patch.dict(os.environ, {kernel_threads.THREADS_VARIABLE: "1"}):
        kernel_threads.kernel_threads.cache_clear()
        yield
    kernel_threads.kernel_threads.cache_clear()


def main() -> int:
    parser = argparse.ArgumentParser(description="Shoal's optimizer kernels against torch's, one thread each.")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--rounds", type=int, default=9, help="at least 7")
    options = parser.parse_args()
    found = rows(options.rounds)
    for each in found:
        against = f"   {each['theirs']:6,.0f}   ratio {each['ratio']:.2f}   ({each['peer']})" if each["ratio"] else ""
        print(f"{each['name']:<16}{each['ours']:6,.0f} {each['unit']}{against}")
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
