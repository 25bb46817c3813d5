"""Outbox of a worker: metrics and output lines on their way to the coordinator, kept while it is unreachable."""

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import replace

from shoal._training.report import Report
from shoal._wire.limits import LOG_BYTES, LOG_LINE_BYTES, LOG_LINES

# Lines kept while they cannot be sent; beyond that, the oldest are dropped.
_KEPT_LINES = 10_000


class Outbox:
    """Collects metrics and lines on any thread. One thread takes reports from it, all within the coordinator's limits.

    Args:
        kept_lines: largest number of lines that wait.

    Attributes:
        lines_lost: lines dropped since the start.
    """

    def __init__(self, kept_lines: int = _KEPT_LINES) -> None:
        self._lock = threading.Lock()  # guards all below
        self._kept_lines = kept_lines
        self._metrics: Report | None = None  # without lines
        self._lines: deque[str] = deque()  # at most _kept_lines, each of at most LOG_LINE_BYTES
        self._lost = 0  # lines dropped since the last `take`
        self.lines_lost = 0

    @property
    def lines_waiting(self) -> int:
        """The number of waiting lines."""
        with self._lock:
            return len(self._lines)

    def add_lines(self, lines: Iterable[str]) -> None:
        """Adds lines to the log; see `add_line`."""
        for line in lines:
            self.add_line(line)

    def add_line(self, line: str) -> None:
        """Adds a line. A line that is longer than the limit is split."""
        with self._lock:
            for piece in _pieces(line):
                self._lines.append(piece)
                self._trim()

    def add_metrics(self, report: Report) -> None:
        """Adds a report's metrics."""
        with self._lock:
            self._metrics = self._metrics.merged_with(report) if self._metrics else report

    def take(self) -> Report | None:
        """Returns the metrics, and as many lines as one report may carry; None if there are neither."""
        with self._lock:
            if self._metrics is None and not self._lines:
                return None
            metrics, self._metrics = self._metrics or Report(), None
            return replace(metrics, log=self._take_lines())

    def put_back(self, report: Report) -> None:
        """Puts back a report that could not be sent."""
        with self._lock:
            metrics = replace(report, log=())
            self._metrics = metrics.merged_with(self._metrics) if self._metrics else metrics
            self._lines.extendleft(reversed(report.log))
            self._trim()

    def _take_lines(self) -> tuple[str, ...]:
        lines: list[str] = []
        size = 0
        if self._lost:
            lines.append(f"[{self._lost} earlier lines were dropped]")
            size += len(lines[0])
            self._lost = 0
        while self._lines and len(lines) < LOG_LINES:
            size += len(self._lines[0].encode())
            if size > LOG_BYTES:
                break
            lines.append(self._lines.popleft())
        return tuple(lines)

    def _trim(self) -> None:
        while len(self._lines) > self._kept_lines:
            self._lines.popleft()
            self._lost += 1
            self.lines_lost += 1


def _pieces(line: str) -> Iterator[str]:
    """Splits a line between characters into pieces within the limit. Lone surrogates become "?"."""
    raw = line.encode(errors="replace")
    start = 0
    while len(raw) - start > LOG_LINE_BYTES:
        piece = raw[start : start + LOG_LINE_BYTES].decode(errors="ignore")
        yield piece
        start += len(piece.encode())
    yield raw[start:].decode()


__all__ = ["Outbox"]
