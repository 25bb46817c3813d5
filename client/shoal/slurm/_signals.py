"""The signals that announce the end of an allocation: SIGTERM, and SIGUSR2, after which submitit requeues it."""

import signal
from types import FrameType, TracebackType

# The exit status of task 0 if the job has not ended: it goes on at the next start. It is EX_TEMPFAIL of sysexits.h.
UNFINISHED = 75


class EndSignals:
    """Notes the signals while the block runs, and restores the earlier handlers afterwards. For the main thread.

    Attributes:
        received: the signals so far. A handler only adds to this set, so it takes no lock that the main thread holds.
    """

    def __init__(self) -> None:
        self.received: set[int] = set()

    def __enter__(self) -> "EndSignals":
        self._earlier = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGUSR2)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._earlier.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received.add(number)


__all__ = ["UNFINISHED", "EndSignals"]
