"""Trainers: sessions on threads of a test. They push whole numbers, so a lost or doubled push shows in the values."""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import shoal
from shoal import optim
from shoal.status import JobState, JobStatus
from support.waiting import wait_until

SESSIONS = 2
MODES = {"sync": shoal.Synchronous(), "async": shoal.Asynchronous()}


class Trainer:
    """Trains a job with sessions on threads of this process, until it is told to stop.

    Args:
        client: client of the cluster.
        name: name of the job, which begins with that of its mode.
        sizes: elements of each variable.
        replicas: copies of each shard.
        options: further options of the sessions.
    """

    def __init__(
        self, client: shoal.Client, name: str, sizes: Mapping[str, int], replicas: int = 1, **options: Any
    ) -> None:
        self._client, self.name, self.replicas = client, name, replicas
        self._options = {"replicas": replicas, **options}
        self._variables = {variable: np.zeros(size, np.float32) for variable, size in sizes.items()}
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

    def longest_pause(self, since: float) -> float:
        """Returns the longest time between two pushes of a session."""
        return max(float(np.diff([it for it in times if it >= since], prepend=since).max()) for times in self.times)

    def rates(self, since: float, until: float) -> list[float]:
        """Returns the pushes a second in each half second."""
        edges = np.arange(since, until, 0.5)
        counts, _ = np.histogram(np.concatenate([np.asarray(it) for it in self.times]), edges)
        return [float(count) / 0.5 for count in counts]

    def metrics(self, calm: float, began: float) -> dict[str, float]:
        """Returns its pushes a second from `calm` to `began` and since then, and its longest pause since then."""
        usual, during = self.rates(calm, began), self.rates(began, time.monotonic())
        return {
            f"pushes a second before, {self.name}": round(float(np.mean(usual)), 1),
            f"pushes a second meanwhile, {self.name}": round(float(np.mean(during)), 1),
            f"pushes a second in the worst half second, {self.name}": min(during),
            f"s longest pause, {self.name}": round(self.longest_pause(began), 3),
            f"pushes acknowledged, {self.name}": self.pushes,
        }

    def check(self, status: JobStatus) -> None:
        """Checks that each acknowledged push counts once, and that nothing went back to a checkpoint."""
        assert not self.failures
        assert (status.restarts, status.failovers) == (0, 0)
        values = self._client.pull(self.name)
        if self.name.startswith("sync"):
            assert len(set(self.accepted)) == 1
            updates = self.accepted[0]  # each step applies the mean of ones
        else:
            updates = self.pushes
        for name in self._variables:
            np.testing.assert_array_equal(values[name], -updates, "updates were lost, or applied twice")

    def _train(self, index: int) -> None:
        try:
            ones = {name: np.ones_like(values) for name, values in self._variables.items()}
            options: dict[str, Any] = {
                "variables": self._variables,
                "optimizer": optim.SGD(1.0),
                "consistency": MODES[self.name.partition("-")[0]],
                "workers": SESSIONS,
                **self._options,
            }
            with self._client.session(self.name, **options) as session:
                while not self.failures and not (self._steps and self.accepted[index] >= self._steps):
                    session.pull()
                    result = session.push(ones)
                    assert result.outcome == "accepted", result
                    self.accepted[index] += 1
                    self.times[index].append(time.monotonic())
        except BaseException as error:
            self.failures.append(error)


@contextmanager
def training(trainers: Sequence[Trainer]) -> Iterator[None]:
    """Lets trainers train for the length of a `with` block."""
    for trainer in trainers:
        trainer.start()
    try:
        yield
    finally:
        for trainer in trainers:
            trainer.stop()


def await_pushes(trainers: Sequence[Trainer], count: int) -> None:
    """Waits until each trainer has made so many more pushes."""
    for trainer in trainers:
        seen = trainer.pushes
        wait_until(lambda: trainer.pushes > seen + count or trainer.failures, timeout_s=60, what="pushes")  # noqa: B023
        assert not trainer.failures, trainer.failures


def await_copies(client: shoal.Client, trainers: Sequence[Trainer]) -> None:
    """Waits until all jobs run, with all copies that they want."""

    def complete() -> bool:
        found = {it.job.name: it for it in client.jobs()}
        wanted = [(found.get(it.name), it.replicas if it.replicas > 1 else 0) for it in trainers]
        return all(it and it.state is JobState.RUNNING and it.copies == many for it, many in wanted)

    wait_until(complete, timeout_s=60, what="all copies")
