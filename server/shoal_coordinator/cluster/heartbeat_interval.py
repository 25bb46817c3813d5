"""Interval of heartbeats: long enough for the load of the coordinator, and short enough for the timeout. Pure."""

# The number of members divided by this is the interval in seconds. Members then send this number of heartbeats per
# second, or a fifth more reports, which are sent earlier. `docs/explanation/scale.md` has the processor time that they
# take. With 1,000 workers and 100 servers, all learn within 3 s that a job was cancelled.
CALLS_PER_S = 340.0
# The interval is at most this part of the heartbeat timeout, so that one lost call and one late one do no harm.
_LARGEST_PART = 1 / 3
# The longest interval in seconds, however long the timeout: workers learn from heartbeats that their job was cancelled,
# and servers clean up.
LONGEST_S = 10.0
# The longest interval of a server. Pulls of a revoked token that wait at a server end with its next heartbeat, and its
# idle lanes with the heartbeat after that: both within 5 s of the revocation. Servers are few beside the workers.
SERVER_LONGEST_S = 2.0


def interval_told_s(interval_s: float, *, server: bool) -> float:
    """Returns the interval that one member is told, from that of all members. A server may have a shorter one."""
    return min(interval_s, SERVER_LONGEST_S) if server else interval_s


def heartbeat_interval_s(members: int, timeout_s: float, shortest_s: float) -> float:
    """Returns the interval that members are told.

    Args:
        members: number of live members.
        timeout_s: the heartbeat timeout, in seconds.
        shortest_s: the interval of a small cluster, in seconds, which the operator has chosen. It is kept even if it
            is longer than a third of the timeout.

    Returns:
        Seconds from one heartbeat or report of a member to the next.
    """
    return max(shortest_s, min(members / CALLS_PER_S, timeout_s * _LARGEST_PART, LONGEST_S))
