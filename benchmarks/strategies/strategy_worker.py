"""One worker of `compare_strategies`: it trains in one run after the other, as lines of JSON on standard input say.

For each run, `compare_strategies` writes the run's description. The worker answers with the address at which it listens
for other workers, gets the addresses of its group, and answers when it is ready. Then it gets the time to begin, trains
until the run is over, and answers with the time and the outcome of each step.
"""

import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import shoal

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples"))
if __name__ == "__main__":
    shoal.tune_allocator()  # before NumPy and gRPC are loaded: later it does less

import numpy as np
from digits import CLASSES, PIXELS, Digits

from shoal._transport import TokenSecurity
from shoal_distribute import Group, GroupSession, ReduceOp

BATCH = 32
SERVERS = 4
_HIDDEN = 64
_SNAPSHOT_S = 0.25

Arrays = Mapping[str, np.ndarray]
Model = Callable[[Arrays, np.random.Generator], Arrays]


class Variables(Protocol):
    """Where a worker gets values, and puts gradients."""

    def pull(self) -> Arrays: ...

    def push(self, gradients: Arrays) -> bool:
        """Returns whether the gradients count."""
        ...


@dataclass(frozen=True)
class Servers:
    """Variables on servers."""

    session: shoal.Session | GroupSession

    def pull(self) -> Arrays:
        values: Arrays = self.session.pull()
        return values

    def push(self, gradients: Arrays) -> bool:
        return self.session.push(gradients, weight=BATCH).outcome == "accepted"


class Copies:
    """Copies of the variables in each worker, whose gradients a group reduces: as `MultiWorkerMirroredStrategy`."""

    def __init__(self, group: Group, values: Arrays, rate: shoal.optim.Schedule) -> None:
        self._group, self._rate, self._steps = group, rate, 0
        self._flat = np.concatenate([it.ravel() for it in values.values()])
        ends = np.cumsum([it.size for it in values.values()])[:-1]
        parts = np.split(self._flat, ends)
        self._values = {name: part.reshape(it.shape) for part, (name, it) in zip(parts, values.items(), strict=True)}

    def pull(self) -> Arrays:
        return self._values

    def push(self, gradients: Arrays) -> bool:
        mean = np.concatenate([gradients[name].ravel() for name in self._values])
        self._group.all_reduce(mean, ReduceOp.MEAN)
        self._flat -= np.float32(self._rate.rate(self._steps)) * mean
        self._steps += 1
        return True


def main() -> None:
    """Trains in runs until standard input ends."""
    digits = Digits(hidden=_HIDDEN)
    for line in sys.stdin:
        say(**Run(json.loads(line), digits).result())


class Run:
    """One run of this worker.

    Args:
        told: the description of the run, from `compare_strategies`.
        digits: the program.
    """

    def __init__(self, told: Mapping[str, Any], digits: Digits) -> None:
        self._told, self._digits = told, digits
        self._rank = int(told["rank"])
        self._steps: list[tuple[float, bool]] = []
        self._snapshots: list[tuple[float, Arrays]] = []

    def result(self) -> dict[str, Any]:
        """Trains, and returns the steps, and the losses if this is the first worker."""
        with ExitStack() as opened:
            group = opened.enter_context(self._group())
            variables = opened.enter_context(self._variables(group))
            say(ready=True)
            began = float(next_line()["begin"])
            time.sleep(max(0.0, began - time.monotonic()))
            self._train(variables, began, group)
        held_out = self._digits.held_out.batch(np.arange(len(self._digits.held_out)))
        losses = [
            (at, self._digits.evaluate(values, held_out)["loss"])
            for at, values in self._snapshots
            if self._told["model"] == "digits"
        ]
        return {"steps": self._steps, "losses": losses}

    def _train(self, variables: Variables, began: float, group: Group | None) -> None:
        rng = np.random.default_rng([self._rank, 1])
        while self._goes_on(time.monotonic() - began, group):
            values = variables.pull()
            now = time.monotonic() - began
            if self._rank == 0 and (not self._snapshots or now - self._snapshots[-1][0] >= _SNAPSHOT_S):
                self._snapshots.append((now, {name: np.array(it) for name, it in values.items()}))
            time.sleep(self._told["compute_s"])
            counts = variables.push(self._gradients(values, rng))
            self._steps.append((time.monotonic() - began, counts))

    def _gradients(self, values: Arrays, rng: np.random.Generator) -> Arrays:
        if self._told["model"] != "digits":
            return {name: it * np.float32(1e-6) for name, it in values.items()}
        images = self._digits.dataset
        return self._digits.loss_and_gradients(values, images.batch(rng.integers(0, len(images), BATCH)))[1]

    def _goes_on(self, passed: float, group: Group | None) -> bool:
        over = passed >= self._told["seconds"]
        # The ranks of a group end after the same step.
        return not (group.broadcast(np.array([over]).astype(np.uint8))[0] if group else over)

    @contextmanager
    def _group(self) -> Iterator[Group | None]:
        listening = socket.create_server(("127.0.0.1", 0))
        say(address=f"127.0.0.1:{listening.getsockname()[1]}")
        members = next_line()
        if len(members["addresses"]) < 2:
            listening.close()
            yield None
            return
        token = TokenSecurity(bytes.fromhex(members["token"]))
        with Group.open(members["rank"], members["addresses"], security=token, listening=listening) as group:
            yield group

    @contextmanager
    def _variables(self, group: Group | None) -> Iterator[Variables]:
        values = starts(self._told["model"])
        rate = shoal.optim.ConstantLR(self._told["rate"], warmup_steps=self._told["warmup_steps"])
        if not self._told["mode"]:
            assert group
            yield Copies(group, values, rate)
            return
        cut = shoal.partitioners.FixedShards(SERVERS) if self._told["partitioned"] else None
        variables = {name: shoal.Variable.of(it, partitioner=cut) for name, it in values.items()}
        options: dict[str, Any] = {
            "workers": self._told["sessions"],
            "optimizer": shoal.optim.SGD(rate),
            "consistency": shoal.consistency.parse(self._told["mode"]),
            "shards": self._told["shards"] or None,
        }
        with shoal.connect(self._told["coordinator"]) as client:
            job = self._told["job"]
            with (
                GroupSession(group, client, job, variables, **options)
                if group
                else client.session(job, variables=variables, **options)
            ) as session:
                yield Servers(session)


def starts(model: str) -> dict[str, np.ndarray]:
    """Returns the initial values, the same at each worker."""
    rng = np.random.default_rng(7)
    if model == "digits":
        return {
            "hidden/w": _he_normal(rng, PIXELS, _HIDDEN),
            "hidden/b": np.zeros(_HIDDEN, np.float32),
            "output/w": _he_normal(rng, _HIDDEN, CLASSES),
            "output/b": np.zeros(CLASSES, np.float32),
        }
    # One matrix with half of the bytes, as the last layer of many models, and many smaller ones: 16 MiB.
    small = {f"layer-{number}": np.zeros((256, 256), np.float32) for number in range(32)}
    return {"large": np.zeros((8192, 256), np.float32), **small}


def _he_normal(rng: np.random.Generator, inputs: int, outputs: int) -> np.ndarray:
    values: np.ndarray = (rng.standard_normal((inputs, outputs)) * np.sqrt(2 / inputs)).astype(np.float32)
    return values


def say(**values: Any) -> None:
    """Writes a line for `compare_strategies`."""
    print(json.dumps(values), flush=True)


def next_line() -> Any:
    """Returns the next line of `compare_strategies`."""
    return json.loads(sys.stdin.readline())


if __name__ == "__main__":
    main()
