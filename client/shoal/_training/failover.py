"""Failover: where the lock groups of a job are now, and how often a call to a lost server is repeated.

`shoal._training.repeated_calls` moves connections by what this module finds.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

from shoal import _rpc, errors
from shoal._rpc import CoordinatorClient
from shoal._system import ENTROPY
from shoal._wire import Placement
from shoal.v1 import job_pb2

# The errors of a server that has no primary of these shards: it was lost and has registered again, or it is being
# promoted. The job has other copies, if it has replicas.
WITHOUT_PRIMARY = (errors.NotPlaced, errors.UnknownJob, errors.UnknownShard)
# Seconds that the coordinator has to say where the groups are. It may be away while training goes on.
_LOCATE_TIMEOUT_S = 2.0
# Seconds between two questions while a server is lost: at first, and at most. Between them, a part of the time since
# the first failure, so that a thousand workers do not keep the coordinator from promoting a backup.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _PART = 0.2, 1.0, 0.15


def locate(coordinator: CoordinatorClient, known: Placement) -> Placement:
    """Returns a placement as it is now. If only its servers have changed, nothing else is sent.

    Args:
        coordinator: client of the coordinator.
        known: the last known placement of the job.

    Raises:
        Unreachable, DeadlineExceeded: the coordinator does not answer. The call is not repeated.
        NotPlaced, UnknownJob: the job's variables are not on servers any more.
    """
    request = job_pb2.GetPlacementRequest(job=known.job, known_generation=known.generation)
    message = coordinator.call(coordinator.jobs.GetPlacement, request, timeout_s=_LOCATE_TIMEOUT_S, retry_for_s=0)
    return known.renewed(message)


class EnteredPlacement:
    """The placement with which a participant has entered its job, as it is now.

    If a job is placed again, the parts of all its workers have ended. If a worker followed to the next placement, a
    late call of it could count there as one of the worker's next part, which may have the same incarnation.

    Args:
        coordinator: client of the coordinator.
        job: name of the job.

    Attributes:
        generation: generation of the placement; 0 before the participant knows it.
    """

    def __init__(self, coordinator: CoordinatorClient, job: str) -> None:
        self._coordinator, self._job, self.generation = coordinator, job, 0
        self._ask = partial(locate, coordinator)

    def refresh(self) -> Placement:
        """Returns the placement.

        Raises:
            StaleGeneration: the job was placed again.
            NotPlaced, UnknownJob: the job's variables are not on servers any more.
        """
        request = job_pb2.GetPlacementRequest(job=self._job)
        found = Placement.from_proto(self._coordinator.call(self._coordinator.jobs.GetPlacement, request))
        if found.generation != self.generation:
            raise errors.StaleGeneration(self._placed_again(found), expected=found.generation, got=self.generation)
        return found

    def locate(self, known: Placement) -> Placement:
        """Returns the placement; see the function `locate`.

        Args:
            known: the last known form of it.

        Raises:
            Unreachable, DeadlineExceeded: the coordinator does not answer.
            NotPlaced, UnknownJob: the job was placed again, or its variables are not on servers any more.
        """
        found = self._ask(known)
        if found.generation != self.generation:
            raise errors.NotPlaced(self._placed_again(found))
        return found

    def _placed_again(self, found: Placement) -> str:
        return (
            f"job {self._job} was placed again, as generation {found.generation}, which has ended the part of this "
            f"worker that began at generation {self.generation}; enter the job again"
        )


def shortened(pause_s: float, jitter: Callable[[], float] = ENTROPY.random) -> float:
    """Returns a pause that is shorter by up to a quarter, so that workers do not ask at the same time.

    Args:
        pause_s: seconds.
        jitter: returns a random number in [0, 1).
    """
    return pause_s * (1 - jitter() / 4)


class Locator:
    """Finds out where the lock groups of a placement are, with one question at a time for all threads.

    Args:
        locate: returns a placement as it is now, as `locate` does; None means that it never changes.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self, locate: Callable[[Placement], Placement] | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._locate, self._clock = locate, clock
        self._lock = threading.Lock()  # guards the next three; held during a question
        self._asked_at = float("-inf")
        self._answer: Placement | None = None
        self._gone = False

    def ask(self, known: Placement, failed_at: float) -> tuple[Placement | None, bool]:
        """Returns the answer to a question that was asked after a time.

        Args:
            known: the last known placement.
            failed_at: the time, such as that of a failed call.

        Returns:
            The placement; None if the coordinator does not answer. And whether the coordinator says that the variables
            are not on servers any more.
        """
        if self._locate is None:
            return None, False
        with self._lock:
            if self._asked_at < failed_at:
                self._asked_at, self._answer, self._gone = self._clock(), None, False
                try:
                    self._answer = self._locate(known)
                except (errors.NotPlaced, errors.UnknownJob):
                    self._gone = True
                except errors.ShoalError:  # the coordinator may be away; the servers go on without it
                    pass
            return self._answer, self._gone

    @property
    def knows(self) -> bool:
        """Whether the coordinator has answered the last question."""
        with self._lock:
            return self._answer is not None


class AttemptBackoff:
    """The waits between the attempts of one call.

    Args:
        failed_at: when the first attempt failed.
        jitter: returns a random number in [0, 1) for each pause.
    """

    def __init__(self, failed_at: float, jitter: Callable[[], float] = ENTROPY.random) -> None:
        self._failed_at, self._jitter = failed_at, jitter
        self._backoff = _rpc.Backoff(jitter)

    @property
    def at_most(self) -> float:
        """Seconds of the next pause of a call to a server that may answer again, before it is shortened."""
        return self._backoff.at_most

    def next(self, now: float, *, moves: bool) -> float:
        """Returns the next pause in seconds.

        Args:
            now: the time.
            moves: whether the shards are expected on another server soon, so that waits stay short.
        """
        pause = self._backoff.next()
        if not moves:
            return pause
        longest = min(max(_FIRST_PAUSE_S, _PART * (now - self._failed_at)), _LONGEST_PAUSE_S)
        return min(pause, shortened(longest, self._jitter))


__all__ = ["WITHOUT_PRIMARY", "AttemptBackoff", "EnteredPlacement", "Locator", "locate", "shortened"]
