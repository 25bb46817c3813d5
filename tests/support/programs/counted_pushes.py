"""Sessions whose pushes can be counted in the values: counted_pushes.py ADDRESS JOB SESSIONS HERE PUSHES.

Each push is a gradient of ones for SGD with a rate of 1, so each element of each variable is minus the number of
updates that were applied. HERE of the job's SESSIONS are threads of this process. Each one pushes PUSHES times, and
pulls periodically. It prints how many pushes were acknowledged, in one line for each session.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import shoal
from shoal import optim

# Elements of each of the two variables, which are on two servers.
SIZE = 300
_PULL_EVERY = 10


def push(client: shoal.Client, job: str, sessions: int, pushes: int) -> int:
    """Returns the number of acknowledged pushes of one session."""
    variables = {"a": np.zeros(SIZE, np.float32), "b": np.zeros(SIZE, np.float32)}
    ones = {name: np.ones(SIZE, np.float32) for name in variables}
    acknowledged, least = 0, 0.0
    with client.session(
        job,
        variables=variables,
        optimizer=optim.SGD(1.0),
        consistency=shoal.Asynchronous(),
        workers=sessions,
        shards=2,
    ) as session:
        for number in range(pushes):
            if number % _PULL_EVERY == 0:
                values = session.pull()
                assert np.ptp(values["a"]) == np.ptp(values["b"]) == 0, "a push has counted in part"
                applied = -values["a"][0]
                assert applied >= max(acknowledged, least), "an acknowledged push is lost"
                least = applied
            acknowledged += session.push(ones).outcome == "accepted"
    return acknowledged


def main(address: str, job: str, sessions: str, here: str, pushes: str) -> None:
    with shoal.Client(address) as client, ThreadPoolExecutor(int(here)) as pool:
        for acknowledged in pool.map(lambda _: push(client, job, int(sessions), int(pushes)), range(int(here))):
            print(acknowledged, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
