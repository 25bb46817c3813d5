"""How a server goes: it says so, and serves on until no job with shards there has to be saved any more."""

import random
import threading
import time
from collections.abc import Callable

import structlog

from shoal import errors
from shoal._rpc import Backoff, CoordinatorClient, MembershipClient
from shoal.v1 import coordinator_pb2

# How often it asks whether it may go.
_ASK_EVERY_S = 0.2
# How long it waits for a coordinator that never answers: there may be none any more, as where a whole cluster goes.
_PATIENCE_S = 10.0
_log = structlog.get_logger(__name__)


def wait_until_drained(
    client: CoordinatorClient,
    member: MembershipClient,
    enough: threading.Event,
    grace_s: float,
    *,
    patience_s: float = _PATIENCE_S,
    jitter: Callable[[], float] = random.random,
) -> None:
    """Says that a server is going, and returns once it may.

    Args:
        client: the way to the coordinator.
        member: the server; it beats on meanwhile.
        enough: set to wait no longer.
        grace_s: seconds that are waited at most.
        patience_s: seconds that are waited at most for the coordinator's first answer.
        jitter: drawn from [0, 1) for each pause while nobody answers, so that servers do not ask all at once.
    """
    began = time.monotonic()
    waiting: list[str] = []
    limit_s, pauses, answered = min(grace_s, patience_s), Backoff(jitter), True
    while not enough.is_set():
        request = coordinator_pb2.DrainRequest(member=member.member, incarnation=member.incarnation)
        try:
            jobs = list(client.call(client.members.Drain, request, retry_for_s=0).jobs)
        except (errors.Unreachable, errors.DeadlineExceeded) as error:
            if answered:
                _log.warning("cannot say that this server goes; trying on", seconds=limit_s, reason=error.message)
                answered = False
                pauses.reset()
            next_s = pauses.next()
        except errors.ShoalError as error:  # this life is over, and what was here is given up
            _log.info("nobody waits for this server", reason=error.message)
            return
        else:
            if not jobs:
                return
            if jobs != waiting:
                _log.info("going once jobs are saved", jobs=jobs)
            waiting, limit_s, next_s, answered = jobs, grace_s, _ASK_EVERY_S, True
        left_s = began + limit_s - time.monotonic()
        if left_s <= 0:
            _log.warning("going before jobs are saved", jobs=waiting, seconds=limit_s, coordinator_answers=answered)
            return
        enough.wait(min(next_s, left_s))


__all__ = ["wait_until_drained"]
