"""Servers that are stopped by SIGTERM and started again, one by one, under load: jobs notice nothing."""

import signal
import time

import pytest

import shoal
from support import run_lengths
from support.clusters.local import local_cluster
from support.session_trainers import Trainer, await_copies, await_pushes, training
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

ROUNDS = run_lengths.runs(1, 10)
SERVERS = 3
JOBS = {"sync": 2, "async": 2, "async-alone": 1}  # names, and the copies of each shard
SIZES = {f"v{index}": 5_000 for index in range(6)}  # a variable for each shard, so that all servers have some


def leave_and_return(cluster: shoal.LocalCluster, index: int) -> float:
    """Stops a server by SIGTERM and starts it again. Returns the seconds until it had left."""
    server, began = cluster.process("server", index), time.monotonic()
    server.send_signal(signal.SIGTERM)
    wait_until(lambda: server.returncode is not None, timeout_s=60, what="the server's end")
    took = time.monotonic() - began
    assert server.returncode == 0
    cluster.restart("server", index)
    return took


@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_rolling_restart_costs_no_update_and_no_error() -> None:
    with local_cluster(servers=SERVERS, workers=0) as cluster, cluster.client() as client:
        trainers = [Trainer(client, name, SIZES, replicas, shards=6) for name, replicas in JOBS.items()]
        with training(trainers):
            await_copies(client, trainers)
            calm = time.monotonic()
            before = sum(trainer.pushes for trainer in trainers)
            wait_until(
                lambda: sum(it.pushes for it in trainers) > before + 200 and time.monotonic() > calm + 2,
                timeout_s=60,
                what="undisturbed pushes",
            )
            began = time.monotonic()
            with run_lengths.count_runs("rolling_restart", ROUNDS, "s longest pause between two pushes") as counted:
                for _ in range(ROUNDS):
                    since = time.monotonic()
                    left = [leave_and_return(cluster, index) for index in range(SERVERS)]
                    await_pushes(trainers, 10)
                    counted.passes(max(it.longest_pause(since) for it in trainers))
                    print(f"servers left after {', '.join(f'{it:.2f}' for it in left)} s")
                for trainer in trainers:
                    counted.metrics |= trainer.metrics(calm, began)
            statuses = {it.job.name: it for it in client.jobs()}
        for trainer in trainers:
            trainer.check(statuses[trainer.name])
