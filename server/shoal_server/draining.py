"""Draining of a server: it keeps serving until every job has moved off it, or has a checkpoint."""

import threading
import time
from collections.abc import Callable, Iterable

import structlog

from shoal import errors
from shoal._rpc import Backoff, CoordinatorClient, MembershipClient
from shoal._system import ENTROPY
from shoal.v1 import coordinator_pb2

# Seconds between two questions whether the server may stop.
_POLL_S = 0.2
# Seconds to wait for a coordinator that never answers: it may have stopped for good, with the whole cluster.
_FIRST_ANSWER_S = 10.0
_log = structlog.get_logger(__name__)


def wait_until_drained(
    client: CoordinatorClient,
    member: MembershipClient,
    stop_now: threading.Event,
    grace_s: float,
    *,
    hosted: Callable[[], Iterable[str]] = tuple,
    first_answer_s: float = _FIRST_ANSWER_S,
    jitter: Callable[[], float] = ENTROPY.random,
) -> None:
    """Reports to the coordinator that a server drains, and returns when the server may stop.

    The function also returns, with a warning in the log, when the time is up.

    Args:
        client: calls the coordinator.
        member: the server's membership; its heartbeats continue meanwhile.
        stop_now: set to end the wait.
        grace_s: longest wait, in seconds.
        hosted: returns the jobs with shards on this server.
        first_answer_s: longest wait for the coordinator's first answer, in seconds.
        jitter: returns a number in [0, 1) for each pause while the coordinator does not answer, so that servers do not
            ask at the same time.
    """
    started_at = time.monotonic()
    waiting: list[str] = []
    saved: set[str] = set()
    limit_s, backoff, answered = min(grace_s, first_answer_s), Backoff(jitter), True
    while not stop_now.is_set():
        try:
            jobs = _drain(client, member, started_at + grace_s - time.monotonic())
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            if answered:
                _log.warning("cannot reach the coordinator to drain; retrying", seconds=limit_s, reason=error.message)
                answered = False
                backoff.reset()
            next_s = backoff.next()
        except errors.ShoalError as error:  # this incarnation is fenced, and its jobs have lost these shards already
            _log.info("the coordinator refuses this incarnation; stopping", reason=error.message)
            return
        else:
            if not jobs:
                _note_lost({*hosted()} - saved)
                return
            saved |= {*jobs}
            if jobs != waiting:
                _log.info("waiting until these jobs have moved to other servers, or are saved", jobs=jobs)
            waiting, limit_s, next_s, answered = jobs, grace_s, _POLL_S, True
        left_s = started_at + limit_s - time.monotonic()
        if left_s <= 0:
            _log.warning(
                "stopping before all jobs have moved or are saved",
                jobs=waiting,
                seconds=limit_s,
                coordinator_answers=answered,
            )
            return
        stop_now.wait(min(next_s, left_s))


def _drain(client: CoordinatorClient, member: MembershipClient, left_s: float) -> list[str]:
    """Tells the coordinator that the server drains, for so many seconds more. Returns the jobs to wait for."""
    request = coordinator_pb2.DrainRequest(
        member=member.member, incarnation=member.incarnation, left_s=max(0.0, left_s)
    )
    return list(client.call(client.members.Drain, request, retry_for_s=0).jobs)


def _note_lost(jobs: set[str]) -> None:
    if jobs:  # the coordinator does not wait for them
        _log.info("values leave with this server: the jobs have ended, or cannot be saved", jobs=sorted(jobs))


__all__ = ["wait_until_drained"]
