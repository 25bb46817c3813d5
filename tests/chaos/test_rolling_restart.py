"""Servers that are stopped by SIGTERM and started again, one by one, under load: jobs with replicas notice nothing."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import optim
from shoal.status import JobStatus
from support import run_lengths
from support.clusters.local import local_cluster
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

ROUNDS = run_lengths.runs(1, 10)
SERVERS, SESSIONS = 3, 2
MODES = {"sync": shoal.Synchronous(), "async": shoal.Asynchronous()}
# Six variables of whole numbers, so that sums are exact, on all servers.
VARIABLES = {f"v{index}": np.zeros(5_000, np.float32) for index in range(6)}
ONES = {name: np.ones_like(values) for name, values in VARIABLES.items()}


class Trainer:
    """Trains a job with sessions on threads of this process, until it is told to stop.

    Args:
        client: client of the cluster.
        name: name of the job, and of its mode.
    """

    def __init__(self, client: shoal.Client, name: str) -> None:
        self._client, self.name = client, name
        self.failures: list[BaseException] = []
        self.times: list[list[float]] = [[] for _ in range(SESSIONS)]  # when each push was acknowledged
        self.accepted = [0] * SESSIONS
        self._steps = 0  # of each session, once they are to end
        self._threads = [threading.Thread(target=self._train, args=(index,)) for index in range(SESSIONS)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._steps = max(self.accepted) + 3  # no session has begun a later step, even without a barrier's wait
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), f"a session of {self.name} hangs: {self.failures}"

    @property
    def pushes(self) -> int:
        return sum(self.accepted)

    def _train(self, index: int) -> None:
        try:
            options: dict[str, Any] = {
                "variables": VARIABLES,
                "optimizer": optim.SGD(1.0),
                "consistency": MODES[self.name],
                "workers": SESSIONS,
                "shards": 6,
                "replicas": 2,
            }
            with self._client.session(self.name, **options) as session:
                while not self.failures and not (self._steps and self.accepted[index] >= self._steps):
                    session.pull()
                    result = session.push(ONES)
                    assert result.outcome == "accepted", result
                    self.accepted[index] += 1
                    self.times[index].append(time.monotonic())
        except BaseException as error:
            self.failures.append(error)


@contextmanager
def training(cluster: shoal.LocalCluster) -> Iterator[list[Trainer]]:
    with cluster.client() as client:
        trainers = [Trainer(client, name) for name in MODES]
        for trainer in trainers:
            trainer.start()
        try:
            yield trainers
        finally:
            for trainer in trainers:
                trainer.stop()


def has_copies(client: shoal.Client, name: str) -> bool:
    return any(it.job.name == name and it.copies == 2 for it in client.jobs())


def leave_and_return(cluster: shoal.LocalCluster, index: int) -> float:
    """Stops a server by SIGTERM and starts it again. Returns the seconds until it had left."""
    server, began = cluster.process("server", index), time.monotonic()
    server.send_signal(signal.SIGTERM)
    wait_until(lambda: server.returncode is not None, timeout_s=60, what="the server's end")
    took = time.monotonic() - began
    assert server.returncode == 0
    cluster.restart("server", index)
    return took


def rates(times: list[list[float]], since: float, until: float) -> list[float]:
    """Returns the pushes of each half second."""
    edges = np.arange(since, until, 0.5)
    counts, _ = np.histogram(np.concatenate([np.asarray(it) for it in times]), edges)
    return [float(count) / 0.5 for count in counts]


@pytest.mark.timeout(120 + 60 * ROUNDS)
def test_rolling_restart_costs_no_update_and_no_error() -> None:
    with local_cluster(servers=SERVERS, workers=0) as cluster, cluster.client() as client:
        with training(cluster) as trainers:
            for trainer in trainers:
                wait_until(lambda: has_copies(client, trainer.name), timeout_s=30, what="both copies")  # noqa: B023
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
                    for trainer in trainers:
                        seen = trainer.pushes
                        wait_until(lambda: trainer.pushes > seen + 10, timeout_s=30, what="pushes")  # noqa: B023
                        assert not trainer.failures
                    counted.passes(max(longest_pause(it, since) for it in trainers))
                    print(f"servers left after {', '.join(f'{it:.2f}' for it in left)} s")
            statuses = {it.job.name: it for it in client.jobs()}
            ended = time.monotonic()
        for trainer in trainers:
            usual, during = rates(trainer.times, calm, began), rates(trainer.times, began, ended)
            print(
                f"{trainer.name}: {trainer.pushes} pushes; {np.mean(usual):.0f} a second before, {np.mean(during):.0f} "
                f"meanwhile, {min(during):.0f} in the worst half second; longest pause "
                f"{longest_pause(trainer, began):.2f} s"
            )
            check(trainer, statuses[trainer.name], client)


def longest_pause(trainer: Trainer, since: float) -> float:
    return max(float(np.diff([it for it in times if it >= since], prepend=since).max()) for times in trainer.times)


def check(trainer: Trainer, status: JobStatus, client: shoal.Client) -> None:
    """Checks that each acknowledged push counts once, and that nothing went back to a checkpoint."""
    assert not trainer.failures
    assert (status.restarts, status.failovers) == (0, 0)
    values = client.pull(trainer.name)
    if trainer.name == "sync":
        assert len(set(trainer.accepted)) == 1
        updates = trainer.accepted[0]  # each step applies the mean of ones
    else:
        updates = trainer.pushes
    for name in VARIABLES:
        np.testing.assert_array_equal(values[name], -updates, "updates were lost, or applied twice")
