"""Start of the daemon threads on which this package receives, sends and computes."""

import threading
from collections.abc import Callable


def start_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """Starts and returns a daemon thread.

    Args:
        target: what it runs.
        name: its name.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    return thread


__all__ = ["start_thread"]
