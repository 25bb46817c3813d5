"""Reader memory: the bytes of values that readers use, with their limits, and the end of slow readers.

An update leaves the memory that readers use to them, and continues in a copy (`snapshot`). So each version that a
reader still reads takes memory of its own. Without a limit, slow readers would keep a copy for each update.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from shoal import errors
from shoal._limits import Limit, catalogue, count_refusal

_log = structlog.get_logger(__name__)

# A reader that is slower than this can be ended when its memory is needed: seconds, and bytes a second after that.
FAIR_S, FAIR_BYTES_A_S = 5.0, 64_000_000
# Seconds until a reader that was told to end is disconnected, because it does not read the error either.
PATIENCE_S = 1.0
# Values of which so many versions are within the limit are not counted. A server has connections for far fewer readers,
# so they would use little, and the count would take a noticeable part of the time of a small pull.
UNCOUNTED_VERSIONS = 1 << 14


@dataclass(slots=True)
class ValueReader:
    """Who reads values.

    Attributes:
        caller: whose limit counts: a token, a certificate or a host.
        end: ends the call, on any thread.
    """

    caller: str = ""
    end: Callable[[], object] = bool


@dataclass(eq=False, slots=True)
class ReaderHold:
    """The use of some bytes of one version by one reader.

    Attributes:
        version: identifies the memory. All readers of one version of a group share it.
        nbytes: bytes that the reader uses.
        whole: bytes of all values of the group.
        reader: the reader.
        fair_until: time from which the reader can be ended.
        ended_by: the limit for which the reader was told to end; None if it was not.
        ended_at: time at which it was told.
    """

    version: object
    nbytes: int
    whole: int
    reader: ValueReader
    fair_until: float
    ended_by: Limit | None = None
    ended_at: float = 0.0

    def check(self) -> None:
        """Raises an error if the reader has to end.

        Raises:
            Overloaded: the reader was slow, and its memory is needed.
        """
        if self.ended_by:
            problem = "the values were read too slowly, and their memory is needed"
            raise self.ended_by.refusal(problem, "try again later")


@dataclass(slots=True)
class _Account:
    """Bytes by version. Readers of one version share its memory, so together they count at most its whole size."""

    used: dict[object, int] = field(default_factory=dict)
    total: int = 0

    def exceeded_by(self, hold: ReaderHold, most: int) -> bool:
        """Returns whether a hold would exceed a limit. The first version, and one that is read already, never do."""
        added = min(hold.nbytes, hold.whole - self._charge(hold))
        return bool(self.total and added) and self.total + added > most

    def add(self, hold: ReaderHold) -> None:
        self._change(hold, hold.nbytes)

    def remove(self, hold: ReaderHold) -> None:
        self._change(hold, -hold.nbytes)

    def _change(self, hold: ReaderHold, nbytes: int) -> None:
        before = self._charge(hold)
        if used := self.used.get(hold.version, 0) + nbytes:
            self.used[hold.version] = used
        else:
            self.used.pop(hold.version, None)
        self.total += self._charge(hold) - before

    def _charge(self, hold: ReaderHold) -> int:
        return min(self.used.get(hold.version, 0), hold.whole)


class ReaderMemory:
    """The bytes of values that the readers of a server use. Thread-safe.

    Args:
        most: largest number of bytes that all readers may use; None means no limit. One caller may use half of it. The
            first version of a caller is never refused for the limit of the caller, and the first of all for neither, so
            that values of any size can be read.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, most: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._most, self._clock = most, clock
        self._lock = threading.Lock()  # guards what follows; taken alone or after a group's lock, and nothing under it
        self._holds: set[ReaderHold] = set()
        self._of_all = _Account()
        self._of_callers: defaultdict[str, _Account] = defaultdict(_Account)

    @property
    def nbytes(self) -> int:
        """Bytes that readers use now."""
        return self._of_all.total

    def counts(self, whole: int) -> bool:
        """Returns whether the readers of values are counted.

        Args:
            whole: bytes of all values of the group.
        """
        return self._most is not None and whole * UNCOUNTED_VERSIONS > self._most

    def take(self, version: object, nbytes: int, whole: int, reader: ValueReader) -> ReaderHold:
        """Counts the use of values until `release`. A version that is read already costs nothing more.

        Args:
            version: identifies the memory.
            nbytes: bytes that the reader uses.
            whole: bytes of all values of the group.
            reader: the reader.

        Returns:
            The use.

        Raises:
            Overloaded: readers use too much memory. The slow ones among them were told to end; call `end_slow` then.
        """
        hold = ReaderHold(version, nbytes, whole, reader, self._clock() + FAIR_S + nbytes / FAIR_BYTES_A_S)
        with self._lock:
            error = self._excess(hold)
            if error:
                raise error
            self._holds.add(hold)
            self._of_all.add(hold)
            self._of_callers[reader.caller].add(hold)
        return hold

    def release(self, hold: ReaderHold) -> None:
        """Ends a use."""
        with self._lock:
            self._holds.discard(hold)
            self._of_all.remove(hold)
            account = self._of_callers[hold.reader.caller]
            account.remove(hold)
            if not account.used:
                del self._of_callers[hold.reader.caller]

    def end_slow(self) -> None:
        """Disconnects the readers that were told to end and have not ended. Called without any lock."""
        latest = self._clock() - PATIENCE_S
        with self._lock:
            found = [hold for hold in self._holds if hold.ended_by and hold.ended_at <= latest]
            for hold in found:
                hold.ended_at = self._clock()  # not at each call
        for hold in found:
            try:
                hold.check()
            except errors.ShoalError as error:
                count_refusal(error)
                _log.warning("disconnected a slow reader", caller=hold.reader.caller, bytes=hold.nbytes, why=str(error))
            hold.reader.end()

    def _excess(self, hold: ReaderHold) -> errors.ShoalError | None:
        """Returns why a use is refused, and tells slow readers to end. Called with the lock held."""
        if self._most is None:
            return None
        caller, half = hold.reader.caller, self._most // 2
        account = self._of_callers.get(caller, _Account())
        if account.exceeded_by(hold, half):
            self._tell_slow(catalogue.CALLER_READER_BYTES, caller)
            return catalogue.CALLER_READER_BYTES.refusal(
                f"pulls of {caller} use {account.total} bytes of values", "try again later", limit=half
            )
        if self._of_all.exceeded_by(hold, self._most):
            self._tell_slow(catalogue.READER_BYTES, None)
            return catalogue.READER_BYTES.refusal(
                f"pulls use {self._of_all.total} bytes of values", "try again later", limit=self._most
            )
        return None

    def _tell_slow(self, limit: Limit, caller: str | None) -> None:
        now = self._clock()
        for hold in self._holds:
            if not hold.ended_by and hold.fair_until <= now and caller in (None, hold.reader.caller):
                hold.ended_by, hold.ended_at = limit, now


__all__ = ["ReaderHold", "ReaderMemory", "ValueReader"]
