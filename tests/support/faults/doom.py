"""Doom: a process that kills itself at a line of some code, so that a test can cover every moment of it."""

import itertools
import os
import signal
import sys
import threading
from types import FrameType
from typing import Any


class Doom:
    """Kills this process at the n-th line of some files, in any thread, counted after `begin`."""

    def __init__(self, line: int, files: set[str]) -> None:
        self._left, self._files = itertools.count(line, -1), files
        self._begun = False
        threading.settrace(self._enter)
        sys.settrace(self._enter)

    def begin(self) -> None:
        self._begun = True

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self._step if frame.f_code.co_filename in self._files else None

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._begun and event == "line" and next(self._left) <= 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._step
