"""Counts of this process's refusals, by limit.

gRPC calls, lanes, the page and the HTTP endpoints call `count_refusal` when an error leaves the process.
"""

import threading
from collections import Counter
from collections.abc import Mapping

from shoal import errors
from shoal._limits import catalogue
from shoal._limits.limit import LimitingRole

_lock = threading.Lock()  # guards _counts
_counts: Counter[str] = Counter()
_NAMES = frozenset(limit.name for limit in catalogue.LIMITS)


def count_refusal(error: errors.ShoalError) -> None:
    """Counts an error that a caller gets, if it names a limit. Any thread may call it."""
    name = error.details.get("limit", "")
    if name in _NAMES:  # a name from elsewhere must not become a label
        with _lock:
            _counts[name] += 1


def refusals(role: LimitingRole) -> Mapping[str, int]:
    """Returns the refusals since the process began, for each limit that a role counts."""
    with _lock:
        return {limit.name: _counts[limit.name] for limit in catalogue.LIMITS if role in limit.roles}


__all__ = ["count_refusal", "refusals"]
