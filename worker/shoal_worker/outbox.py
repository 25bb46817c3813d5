"""What a trainer did and wrote, on its way to the coordinator: the same outbox as a session's."""

from shoal._limits import LOG_LINE_BYTES as MAX_LINE_BYTES
from shoal._outbox import Outbox

__all__ = ["MAX_LINE_BYTES", "Outbox"]
