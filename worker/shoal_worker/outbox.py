"""What a trainer did and wrote, on its way to the coordinator: kept while that is away, and bounded."""

import threading
from collections import deque
from dataclasses import replace

from shoal._participant import Report

# The contract's limits of one report's lines, and a part of the largest message.
_MAX_LINES, MAX_LINE_BYTES, _MAX_BYTES = 1_000, 8_192, 1 << 20
# Lines kept while they cannot be sent; then the oldest go.
_KEPT_LINES = 10_000


class Outbox:
    """Collects on the threads that read from a trainer; emptied by the daemon's own.

    Args:
        kept_lines: how many lines wait at most.
    """

    def __init__(self, kept_lines: int = _KEPT_LINES) -> None:
        self._lock = threading.Lock()  # guards all below
        self._kept_lines = kept_lines
        self._figures: Report | None = None  # without lines
        self._lines: deque[str] = deque()  # at most _kept_lines
        self._lost = 0  # lines dropped since the last that was taken
        self.lines_lost = 0  # in all

    def add_line(self, line: str) -> None:
        """Adds a line of at most MAX_LINE_BYTES."""
        with self._lock:
            self._lines.append(line)
            self._trim()

    def add_figures(self, report: Report) -> None:
        """Adds a report's figures."""
        with self._lock:
            self._figures = self._figures.then(report) if self._figures else report

    def take(self) -> Report | None:
        """The figures, and as many lines as one report may carry; None if there is nothing."""
        with self._lock:
            if self._figures is None and not self._lines:
                return None
            figures, self._figures = self._figures or Report(), None
            return replace(figures, log=self._take_lines())

    def put_back(self, report: Report) -> None:
        """Returns what was taken and could not be sent."""
        with self._lock:
            figures = replace(report, log=())
            self._figures = figures.then(self._figures) if self._figures else figures
            self._lines.extendleft(reversed(report.log))
            self._trim()

    def _take_lines(self) -> tuple[str, ...]:
        lines: list[str] = []
        size = 0
        if self._lost:
            lines.append(f"[{self._lost} earlier lines were dropped]")
            self._lost = 0
        while self._lines and len(lines) < _MAX_LINES and size < _MAX_BYTES:
            lines.append(self._lines.popleft())
            size += len(lines[-1])
        return tuple(lines)

    def _trim(self) -> None:
        while len(self._lines) > self._kept_lines:
            self._lines.popleft()
            self._lost += 1
            self.lines_lost += 1
