"""Helper that waits for a condition with a deadline, in place of a sleep."""

import threading
import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], *, timeout_s: float = 20.0, what: str = "the condition") -> None:
    """Returns once `condition()` holds. Raises AssertionError if it does not hold within `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true within {timeout_s} s"
        pause.wait(0.01)
