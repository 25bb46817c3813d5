"""A worker of Shoal: python session_worker.py COORDINATOR NAME REPLICAS MODE LOG.

It opens a session and trains until it is killed. Each update adds one to each element, so a value says how many updates
the model has.
"""

import sys
import time

import numpy as np
import update_log
from schedule import SERVERS, WORKERS

import shoal

JOB = "kills"


def main() -> None:
    coordinator, name, replicas, mode, path = sys.argv[1:]
    log = update_log.UpdateLog(path)
    variables = {f"v{number}": np.zeros(shape, np.float32) for number, shape in enumerate(update_log.SHAPES)}
    gradients = {name: -np.ones_like(value) for name, value in variables.items()}
    with (
        shoal.Client(coordinator, retry_for_s=60) as client,
        client.session(
            JOB,
            variables=variables,
            worker=name,
            workers=WORKERS,
            shards=SERVERS,  # each server has half of the variables, as in TensorFlow
            optimizer=shoal.optim.SGD(1.0),
            consistency=shoal.Asynchronous() if mode == "async" else shoal.Synchronous(),
            replicas=int(replicas),
            restore="auto",  # with one replica, a session job fails with a server, and continues from its checkpoint
            checkpoints=shoal.CheckpointPolicy(every_s=update_log.CHECKPOINT_S, at_end=False),
        ) as session,
    ):
        while True:
            values, at = session.pull(), time.monotonic()
            time.sleep(update_log.COMPUTE_S)
            if session.push(gradients, weight=update_log.BATCH).outcome == "accepted":
                log.append(int(values["v0"][0, 0]), at)


if __name__ == "__main__":
    main()
