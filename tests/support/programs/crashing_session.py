"""A process with one session of two of a synchronous job, which stops at a step, so that it can be killed there.

python crashing_session.py ADDRESS JOB STEP. It writes a line for each step that it has taken: the step, and the
numbers of its samples. The session of rank 0 takes a checkpoint two steps before it stops.
"""

import signal
import sys
from typing import Any

import numpy as np

import shoal

VARIABLES = {"layer": {"w": np.linspace(0, 1, 5), "b": np.zeros(())}}
SAMPLES = 100


def options(**changes: Any) -> dict[str, Any]:
    """Returns the job's options, with some changes."""
    return {"variables": VARIABLES, "batch_size": 5, "optimizer": shoal.optim.Adam(0.01), "seed": 3, **changes}


def step(session: shoal.Session, numbers: np.ndarray) -> None:
    """Takes a step on some samples."""
    params = session.pull()
    x = np.cos(numbers)[:, None] * np.arange(1, 6)
    error = x @ params["layer"]["w"] + params["layer"]["b"] - 1
    gradients = {"layer": {"w": x.T @ error / len(numbers), "b": np.asarray(error.mean())}}
    session.push(gradients, weight=len(numbers))


def main(address: str, job: str, last: int) -> None:
    """Trains up to a step, and waits there for its end."""
    with shoal.Client(address) as client, client.session(job, restore="auto", workers=2, **options()) as session:
        for numbers in session.batches(SAMPLES):
            at = session.step
            if at == last:
                signal.pause()
            if at == last - 2 and session.rank == 0:
                session.checkpoint(timeout_s=20)
            step(session, numbers)
            print(at, *numbers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
