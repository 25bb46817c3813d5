"""The number of open files that a coordinator may need, and the warning if this process may not have as many."""

import structlog

from shoal._limits import catalogue
from shoal._system import open_files_warning
from shoal_coordinator.effects import MAX_CHANNELS

_log = structlog.get_logger(__name__)

# The connections that the ports of a coordinator accept.
_ACCEPTED = (catalogue.CONNECTIONS, catalogue.PAGE_CONNECTIONS, catalogue.HTTP_CONNECTIONS)
# The store, logs, libraries and the checkpoint storage.
_OTHER_FILES = 512


def warn_of_few_files() -> None:
    """Warns if the limit on open files is lower than the number that all connections of a coordinator need."""
    connections = sum(limit.default for limit in _ACCEPTED) + MAX_CHANNELS
    if warning := open_files_warning(connections + _OTHER_FILES, f"{connections} connections"):
        _log.warning("connections of members may be refused", reason=warning)


__all__ = ["warn_of_few_files"]
