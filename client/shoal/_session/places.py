"""Wait of a session for a place in its job, which a session that has died may still hold."""

import time
from collections.abc import Callable
from typing import TypeVar

from shoal import errors

T = TypeVar("T")

# The detail of the refusal of a full job: seconds until the place of a session that has died is free.
FREE_AFTER = "free_after_s"

# Seconds between two attempts. Seconds by which the coordinator may find a death later than it announced.
_ASK_AGAIN_S, _SLACK_S = 0.5, 2.0


def enter_when_free(
    enter: Callable[[], T],
    *,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Enters a job, and tries again while the job is full, as long as a session of it may prove to be dead.

    Args:
        enter: enters the job.
        sleep: waits for some seconds.
        clock: monotonic clock, in seconds.

    Returns:
        What `enter` returned.

    Raises:
        Overloaded: the job is still full after the coordinator has found all sessions that died before the call.
    """
    began = clock()
    while True:
        try:
            return enter()
        except errors.Overloaded as error:
            free_after, waited = error.details.get(FREE_AFTER), clock() - began
            if free_after is None:
                raise
            if waited > float(free_after) + _SLACK_S:
                raise errors.Overloaded(
                    f"{error.message}. This session has waited {waited:.0f} s for a place", **error.details
                ) from None
        sleep(_ASK_AGAIN_S)


__all__ = ["FREE_AFTER", "enter_when_free"]
