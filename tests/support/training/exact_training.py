"""Training in which each update is a whole number, so that "each acknowledged update counts once" is an equality.

Sessions in threads push ones, with SGD and a learning rate of 1, to a job with two copies of each shard. Each session
keeps what was acknowledged, and checks with each pull that the values have it.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

import shoal
from shoal import optim
from shoal._wire.placement import Placement
from shoal.consistency import Consistency
from shoal.status import JobStatus
from support.clusters.cluster_probe import placement
from support.waiting import wait_until

# One variable a shard, so that each of three servers has two.
NAMES = ("a", "b", "c", "d", "e", "f")


class ExactTraining:
    """A job that is trained by sessions in threads until `end`.

    Args:
        client: a client of the cluster.
        job: name of the job.
        mode: its consistency mode.
        sessions: number of sessions.
        elements: number of elements of each of its variables.
        options: further options of the sessions.

    Attributes:
        client, job: as given.
        ones: what is pushed.
    """

    def __init__(
        self,
        client: shoal.Client,
        job: str,
        mode: Consistency,
        *,
        sessions: int = 2,
        elements: int = 2_000,
        **options: Any,
    ) -> None:
        self.client, self.job, self._mode, self._elements = client, job, mode, elements
        self._joined = isinstance(mode, shoal.Synchronous)
        self._variables = {name: np.zeros(elements, np.float32) for name in NAMES}
        given = {"replicas": 2, "shards": len(NAMES), "checkpoints": shoal.CheckpointPolicy(every_s=0, at_end=False)}
        self.ones = {name: np.ones_like(value) for name, value in self._variables.items()}
        self._options = {**given, "optimizer": optim.SGD(1.0), "consistency": mode, **options}
        self._count = sessions
        self._changed = threading.Condition()  # guards the rest
        self._acknowledged = [0] * sessions
        self._calls = [(0.0, 0.0)] * sessions  # when the latest acknowledged push of each session began and ended
        self._steps = [0] * sessions
        self._others = 0  # acknowledged pushes of other sessions
        self._goal: int | None = None
        self._paused, self._waiting = False, 0
        self._errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._run, args=(rank,)) for rank in range(sessions)]

    def start(self) -> None:
        """Starts the sessions, and waits until there is a job."""
        for thread in self._threads:
            thread.start()
        wait_until(lambda: self._fails() or self.job in {it.job.name for it in self.client.jobs()}, what="the job")

    def wait_for_start(self) -> None:
        """Waits until each session has pushed, and every shard has two copies."""
        self.wait_for_pushes()
        self.wait_for_copies()

    @property
    def acknowledged(self) -> int:
        """Number of pushes that were acknowledged, of all sessions."""
        with self._changed:
            return sum(self._acknowledged) + self._others

    @property
    def status(self) -> JobStatus:
        """Status of the job."""
        return self.client.job(self.job).status()

    @property
    def placement(self) -> Placement:
        """Placement of the job."""
        return placement(self.client, self.job)

    def roles(self) -> dict[str, set[str]]:
        """Returns which servers have which roles: "primary", "backup" or both, by member id."""
        found: dict[str, set[str]] = {}
        for shard in self.placement.shards:
            found.setdefault(shard.server, set()).add("primary")
            if shard.backup:
                found.setdefault(shard.backup, set()).add("backup")
        return found

    def wait_for_copies(self, timeout_s: float = 30.0) -> None:
        """Waits until every shard has two complete copies."""
        wait_until(lambda: self._fails() or self.status.copies == 2, timeout_s=timeout_s, what="two copies")
        self.check()

    def wait_for_pushes(self, since: float | None = None, timeout_s: float = 30.0) -> float:
        """Waits until each session has an acknowledgement for a push that it began after a time.

        Args:
            since: the time, of `time.monotonic`; None means now.
            timeout_s: seconds to wait at most.

        Returns:
            The seconds from then until the last of these acknowledgements.
        """
        since = time.monotonic() if since is None else since
        first: dict[int, float] = {}

        def all_have() -> bool:
            for rank, (began, ended) in enumerate(self._calls):
                if began > since:
                    first.setdefault(rank, ended)
            return bool(self._errors) or len(first) == self._count

        with self._changed:
            flows = self._changed.wait_for(all_have, timeout_s)
        self.check()
        assert flows, f"only sessions {sorted(first)} push again {timeout_s} s later; {self.status}"
        return max(first.values()) - since

    def check(self) -> None:
        """Raises the first error of a session."""
        if self._errors:
            raise self._errors[0]

    def pause(self) -> None:
        """Lets the sessions wait before their next steps, and returns when all of them wait."""
        with self._changed:
            self._paused, self._waiting = True, 0
            assert self._changed.wait_for(lambda: self._errors or self._waiting == self._count, 30)
        self.check()

    def go_on(self) -> None:
        """Ends a pause."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def acknowledges(self, pushes: int) -> None:
        """Counts pushes of ones that others made, and that were acknowledged."""
        with self._changed:
            self._others += pushes

    def end(self) -> None:
        """Ends the sessions at one step, and checks that the values have each acknowledged update once.

        May be called twice.
        """
        with self._changed:
            if self._goal is not None:
                return
            self._goal = max(self._steps) + 3 if self._joined else 0
        for thread in self._threads:
            thread.join(60)
        self.check()
        assert not any(thread.is_alive() for thread in self._threads), "a session does not end"
        total = self._goal if self._joined else self.acknowledged
        for name, values in self.client.pull(self.job).items():
            np.testing.assert_array_equal(values, -total, f"{name} has lost updates, or has some twice")

    def abandon(self) -> None:
        """Ends the job after a failure, and waits for the threads."""
        with self._changed:
            self._goal, self._paused = 0, False
            self._changed.notify_all()
        if any(thread.is_alive() for thread in self._threads):
            self.client.cancel(self.job)
        for thread in self._threads:
            if thread.ident:
                thread.join(60)

    def _fails(self) -> bool:
        return bool(self._errors)

    def _run(self, rank: int) -> None:
        try:
            options = {**self._options, "workers": self._options.get("workers", self._count)}
            name = f"{self.job}-{rank}"
            with self.client.session(self.job, variables=self._variables, worker=name, **options) as session:
                self._train(session, rank)
        except BaseException as error:
            with self._changed:
                self._errors.append(error)
                self._changed.notify_all()

    def _train(self, session: shoal.Session, rank: int) -> None:
        seen: dict[str, np.ndarray] = self._variables
        while self._goal is None or session.step < self._goal:
            self._wait_for_pause()
            values = session.pull()
            self._check_values(session, rank, values, seen)
            seen, began = values, time.monotonic()
            result = session.push(self.ones)
            assert result.outcome == "accepted", result
            with self._changed:
                self._acknowledged[rank] += 1
                self._steps[rank] = result.step
                self._calls[rank] = began, time.monotonic()
                self._changed.notify_all()

    def _wait_for_pause(self) -> None:
        with self._changed:
            if self._paused:
                self._waiting += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: not self._paused)

    def _check_values(
        self, session: shoal.Session, rank: int, values: Mapping[str, np.ndarray], seen: Mapping[str, np.ndarray]
    ) -> None:
        """Checks that pulled values have all that this session has pushed and seen."""
        for name, found in values.items():
            if self._joined:
                np.testing.assert_array_equal(found, -session.step, f"{name} at step {session.step}")
                continue
            assert found.max() <= -self._acknowledged[rank], f"{name} lacks an acknowledged update"
            assert (found <= seen[name]).all(), f"{name} lacks an update that was seen"


@contextmanager
def exact_training(
    client: shoal.Client, job: str, mode: Consistency, *, waits: bool = True, **options: Any
) -> Iterator[ExactTraining]:
    """Yields a job in training. At the end, checks its values and drops it.

    Args:
        client, job, mode, options: as for `ExactTraining`.
        waits: whether to wait for its start.
    """
    training = ExactTraining(client, job, mode, **options)
    try:
        training.start()
        if waits:
            training.wait_for_start()
        yield training
        training.end()
    except BaseException:
        training.abandon()
        raise
    client.drop(job)


def chosen(roles: Mapping[str, set[str]], wanted: Sequence[str]) -> str:
    """Returns the server with exactly these roles; if there is none, the one with the most roles."""
    exact = [server for server, found in sorted(roles.items()) if found == set(wanted)]
    return exact[0] if exact else max(sorted(roles), key=lambda server: len(roles[server]))


__all__ = ["NAMES", "ExactTraining", "chosen", "exact_training"]
