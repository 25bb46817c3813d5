"""A process with one session of two of a synchronous job, which stops at a step, so that it can be killed there.

python crashing_session.py ADDRESS JOB STEP. It writes a line for each step that it has taken: the step, and the
numbers of its samples. Two steps before it stops, the session of rank 0 takes a checkpoint directly after its push. The
other session pushes this step after the checkpoint, so the checkpoint has the position of the two in the middle of
their ranges, and neither push.
"""

import signal
import sys
from typing import Any

import numpy as np

import shoal
from shoal.events import CheckpointEnded

VARIABLES = {"layer": {"w": np.linspace(0, 1, 5), "b": np.zeros(())}}
SAMPLES = 100
# Each range has five batches, each server one of the variables, and the gradients of the first steps are clipped.
JOB = {"batch_size": 5, "range_size": 25, "shards": 2, "seed": 3}


def options(**changes: Any) -> dict[str, Any]:
    """Returns the job's options, with some changes."""
    return {"variables": VARIABLES, "optimizer": shoal.optim.Adam(0.01, clip_norm=1.0), **JOB, **changes}


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
            if at == last - 2 and session.rank != 0:
                next(event for event in client.job(job).events() if isinstance(event, CheckpointEnded))
            step(session, numbers)
            if at == last - 2 and session.rank == 0:
                session.checkpoint(timeout_s=20)
            print(at, *numbers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
