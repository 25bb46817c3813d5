"""Servers that join under load, and leave again: shards move to them and back, and jobs notice nothing."""

import signal
import time
from collections import Counter

import pytest

import shoal
from support import run_lengths
from support.clusters.cluster_probe import placement
from support.clusters.local import local_cluster
from support.session_trainers import Trainer, await_copies, await_pushes, training
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

ROUNDS = run_lengths.runs(1, 10)
JOBS = {"sync": 2, "async": 2, "sync-alone": 1, "async-alone": 1}  # names, and the copies of each shard
SIZES = {f"v{index}": 64_000 for index in range(48)}  # 256 kB each, 12 MB in all
EVEN = 0.1  # of the mean


def is_even(client: shoal.Client, trainer: Trainer, servers: int) -> bool:
    """Returns whether so many servers have their share of a job's bytes."""
    loads: Counter[str] = Counter()
    for shard in placement(client, trainer.name).shards:
        loads[shard.server] += shard.layout.nbytes
    mean = sum(loads.values()) / servers
    return len(loads) == servers and all(abs(it - mean) <= EVEN * mean for it in loads.values())


def await_even(client: shoal.Client, trainers: list[Trainer], servers: int) -> float:
    """Waits until all jobs are even over so many servers, with all copies. Returns the seconds that it took."""
    began = time.monotonic()
    for trainer in trainers:
        wait_until(
            lambda: trainer.failures or is_even(client, trainer, servers),  # noqa: B023
            timeout_s=90,
            what=f"even shares of {trainer.name}",
        )
        assert not trainer.failures, trainer.failures
    await_copies(client, trainers)
    return time.monotonic() - began


@pytest.mark.timeout(150 + 120 * ROUNDS)
def test_servers_that_come_and_go_cost_no_update_and_no_error() -> None:
    with local_cluster(servers=2, workers=0) as cluster, cluster.client() as client:
        trainers = [Trainer(client, name, SIZES, replicas, shards=48) for name, replicas in JOBS.items()]
        with training(trainers):
            await_copies(client, trainers)
            await_even(client, trainers, 2)
            calm = time.monotonic()
            await_pushes(trainers, 40)
            began = time.monotonic()
            with run_lengths.count_runs("scale_out_in", ROUNDS, "s longest pause between two pushes") as counted:
                for number in range(ROUNDS):
                    since = time.monotonic()
                    server = cluster.restart("server", 2) if number else cluster.add_server()
                    out_s = await_even(client, trainers, 3)
                    await_pushes(trainers, 10)
                    server.send_signal(signal.SIGTERM)
                    wait_until(lambda: server.returncode is not None, timeout_s=90, what="the end")  # noqa: B023
                    assert server.returncode == 0
                    in_s = await_even(client, trainers, 2)
                    await_pushes(trainers, 10)
                    counted.passes(max(it.longest_pause(since) for it in trainers))
                    print(f"three servers were even after {out_s:.1f} s, two after {in_s:.1f} s")
                for trainer in trainers:
                    counted.metrics |= trainer.metrics(calm, began)
            statuses = {it.job.name: it for it in client.jobs()}
        for trainer in trainers:
            trainer.check(statuses[trainer.name])
