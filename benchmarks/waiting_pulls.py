"""Benchmark of pushes while 200 pulls wait: python benchmarks/waiting_pulls.py.

One server runs in a process of its own. In one job, a worker that is too far ahead of the others sends 200 pulls, which
must wait. In another job, a worker pushes 100 KB a step. The script measures the median time of its pushes five times
with the waiting pulls and five times without them, in turn. It prints one JSON line. Its exit status is 1 if the ratio
of the two medians is above 2.
"""

import json
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

import shoal
from shoal.v1 import header_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1.parameter_server_pb2_grpc import ParameterServerStub

WAITING, ROUNDS, PUSHES = 200, 5, 200
MOST_RATIO = 2.0  # times a push's duration without waiting pulls
PATIENCE_S = 20


def median_push(session: shoal.Session, gradient: dict[str, np.ndarray], pushes: int) -> float:
    times = []
    for _ in range(pushes):
        start = time.perf_counter()
        session.push(gradient)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


@contextmanager
def a_session_ahead_of_its_bound(client: shoal.Client) -> Iterator[shoal.Session]:
    """Yields the first of two sessions with bound 0. It has pushed, so its next pull waits for the second one."""
    entered, done = threading.Event(), threading.Event()

    def lag() -> None:
        with client.session("waits", workers=2, variables=variables, consistency=mode, shards=1):
            entered.set()
            done.wait()

    variables, mode = {"w": shoal.Variable((1000,))}, shoal.BoundedStaleness(0)
    laggard = threading.Thread(target=lag)
    laggard.start()
    with client.session("waits", workers=2, variables=variables, consistency=mode, shards=1) as session:
        entered.wait()
        session.push({"w": np.ones(1000, np.float32)})
        try:
            yield session
        finally:
            done.set()
            laggard.join()


def await_waiting(metrics: str, count: int) -> None:
    """Waits until the server at this /metrics address reports this number of waiting pulls."""
    deadline = time.monotonic() + PATIENCE_S
    while (waiting := waiting_at(metrics)) != count:
        if time.monotonic() > deadline:
            sys.exit(f"{waiting:.0f} pulls wait after {PATIENCE_S} s; there should be {count}")
        time.sleep(0.01)


def waiting_at(metrics: str) -> float:
    with urllib.request.urlopen(f"http://{metrics}/metrics", timeout=5) as reply:
        families = text_string_to_metric_families(reply.read().decode())
    (gauge,) = (family for family in families if family.name == "shoal_server_waiting_pulls")
    return gauge.samples[0].value


@contextmanager
def waiting_pulls(stub: ParameterServerStub, stamp: header_pb2.Stamp, metrics: str) -> Iterator[None]:
    """Opens 200 Pull streams that wait at the server. After the `with` block, none waits any more."""
    request = pb.PullRequest(stamp=stamp, shards=[0])
    calls = [stub.Pull(request) for _ in range(WAITING)]
    await_waiting(metrics, WAITING)
    yield
    await_waiting(metrics, WAITING)
    for call in calls:
        call.cancel()
    await_waiting(metrics, 0)


def stamp_of(session: shoal.Session, client: shoal.Client) -> header_pb2.Stamp:
    """Returns the stamp of a session's next call, if its job was placed last."""
    status = client.status()
    (incarnation,) = (member.incarnation for member in status.members if member.member == session.worker)
    return header_pb2.Stamp(
        job=session.job, worker=session.worker, incarnation=incarnation, step=session.step, generation=status.generation
    )


def main() -> int:
    rounds, pushes = (1, 20) if "--short" in sys.argv[1:] else (ROUNDS, PUSHES)
    gradient = {"w": np.ones(25_000, np.float32)}
    with (
        # The calls of the waiting pulls have no token.
        shoal.LocalCluster(servers=1, workers=0, env={"SHOAL_INSECURE": "1"}) as cluster,
        cluster.client() as client,
        client.session("busy", variables=gradient, consistency=shoal.Asynchronous(), shards=1) as busy,
        a_session_ahead_of_its_bound(client) as ahead,
        grpc.insecure_channel(cluster.process("server").address) as channel,
    ):
        stub, stamp = ParameterServerStub(channel), stamp_of(ahead, client)
        alone, beside = [], []
        for _ in range(rounds):
            alone.append(median_push(busy, gradient, pushes))
            with waiting_pulls(stub, stamp, cluster.metrics["server-0"]):
                beside.append(median_push(busy, gradient, pushes))
    row: dict[str, Any] = {
        "name": "push_beside_200_waiting_pulls",
        "ours_ms": statistics.median(beside) * 1e3,
        "alone_ms": statistics.median(alone) * 1e3,
        "ratio": statistics.median(beside) / statistics.median(alone),
    }
    print(json.dumps(row))
    return 1 if row["ratio"] > MOST_RATIO else 0


if __name__ == "__main__":
    sys.exit(main())
