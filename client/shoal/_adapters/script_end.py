"""End of the user's script, for objects that no `with` block closes."""

import atexit
from collections.abc import Callable
from typing import Any

from shoal._training import failure_at_exit


class ScriptEnd:
    """Closes something at the end of the script, with the failure of the script as far as `failure_at_exit` knows it.

    Args:
        close: called with the text of the exception; "" means that there is none.
    """

    def __init__(self, close: Callable[[str], Any]) -> None:
        self._close = close
        atexit.register(self._at_exit)

    def over(self) -> None:
        """Forgets it: it is being closed now."""
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        self._close(failure_at_exit())


__all__ = ["ScriptEnd"]
