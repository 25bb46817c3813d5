"""How much 200 pulls that wait slow down the pushes that go on meanwhile: python benchmarks/waiting_pulls.py.

One server in a process of its own. In one job a worker that is ahead of its bound asks 200 times for values that it may
not have yet; in another a worker pushes 100 KB a step. Its median push is taken with the waiting pulls and without, in
turn, five times each. Prints one JSON line; asked: a ratio of at most 2.
"""

import json
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

import shoal
from shoal.v1 import parameter_server_pb2 as pb

WAITING, ROUNDS, PUSHES = 200, 5, 200


def median_push(session: shoal.Session, gradient: dict[str, np.ndarray]) -> float:
    times = []
    for _ in range(PUSHES):
        start = time.perf_counter()
        session.push(gradient)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@contextmanager
def a_session_ahead_of_its_bound(client: shoal.Client) -> Iterator[shoal.Session]:
    """Of two sessions with bound 0 the first has pushed, so that its next pull waits for the second."""
    entered, done = threading.Event(), threading.Event()

    def lag() -> None:
        with client.session("waits", workers=2, variables=variables, consistency=mode):
            entered.set()
            done.wait()

    variables, mode = {"w": shoal.Variable((1000,))}, shoal.BoundedStaleness(0)
    laggard = threading.Thread(target=lag)
    laggard.start()
    with client.session("waits", workers=2, variables=variables, consistency=mode) as session:
        entered.wait()
        session.push({"w": np.ones(1000, np.float32)})
        yield session
        done.set()
        laggard.join()


@contextmanager
def waiting_pulls(session: shoal.Session) -> Iterator[None]:
    """200 Pull streams that the server has parked."""
    parameters = session._parameters
    (server,) = parameters._servers
    request = pb.PullRequest(stamp=parameters._stamp(), shards=server.indices)
    calls = [server.stub.Pull(request) for _ in range(WAITING)]
    yield
    for call in calls:
        call.cancel()


def main() -> None:
    gradient = {"w": np.ones(25_000, np.float32)}
    with (
        shoal.LocalCluster(servers=1, workers=0) as cluster,
        cluster.client() as client,
        client.session("busy", variables=gradient, consistency=shoal.Asynchronous(), shards=1) as busy,
        a_session_ahead_of_its_bound(client) as ahead,
    ):
        alone, beside = [], []
        for _ in range(ROUNDS):
            alone.append(median_push(busy, gradient))
            with waiting_pulls(ahead):
                beside.append(median_push(busy, gradient))
    row = {
        "name": "push_beside_200_waiting_pulls",
        "ours_ms": statistics.median(beside) * 1e3,
        "alone_ms": statistics.median(alone) * 1e3,
        "ratio": statistics.median(beside) / statistics.median(alone),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
