"""One script for each task of TF_CONFIG: a ClusterCoordinator schedules steps of training until a file exists.

It prints the results, which are the same in all tasks. `FOLDER` has the file, `stop`, a file for each worker that has
run a step, named by its process id, and a file `written by TYPE` for each type of task that writes files.
"""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from shoal import optim
from shoal.data import from_arrays
from shoal_distribute import ClusterCoordinator, ParameterServerStrategy

BATCH = 40  # calls between two joins
STEP_S = 0.02
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 4))


def check(output: dict[str, Any]) -> None:
    """Checks that each call has one result, and that no execution has given two."""
    numbers = [number for number, _, _ in output["results"]]
    assert numbers == [*range(len(numbers))]
    assert len({(pid, execution) for _, pid, execution in output["results"]}) == len(numbers)


def main(folder: Path) -> dict[str, Any]:
    """Runs the script; returns the result, the process and the execution of each call, and the steps that count."""
    strategy = ParameterServerStrategy(devices=["/cpu:0"])
    coordinator = ClusterCoordinator(strategy)
    with strategy.scope():
        optimizer = optim.SGD(1.0)
        weights = strategy.create_variable("w", np.zeros(4))
        strategy.adopt_optimizer(optimizer)
    executions = 0  # of this process

    def step(batches: Iterator[np.ndarray], number: int) -> tuple[int, int, int]:
        nonlocal executions
        executions += 1
        strategy.run(lambda x: strategy.apply_gradients(optimizer, [(np.ones_like(x[0]), weights)]), (next(batches),))
        time.sleep(STEP_S)  # the work of a step
        (folder / str(os.getpid())).touch()
        return number, os.getpid(), executions

    batches = iter(coordinator.create_per_worker_dataset(lambda: from_arrays(X).repeat().batch(8)))
    results: list[tuple[int, int, int]] = []
    while not results or not coordinator.schedule((folder / "stop").exists).fetch():  # the same answer in all tasks
        values = [coordinator.schedule(step, (batches, len(results) + more)) for more in range(BATCH)]
        coordinator.join()
        results += coordinator.fetch(values)
    if strategy.writes_files:
        (folder / f"written by {json.loads(os.environ['TF_CONFIG'])['task']['type']}").touch()
    return {"results": results, "steps": -float(weights.numpy()[0])}


if __name__ == "__main__":
    print(json.dumps(main(Path(os.environ["FOLDER"]))), flush=True)
