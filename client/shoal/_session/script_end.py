"""End of the user's script, for objects that no `with` block closes."""

import atexit
import sys
from collections.abc import Callable
from typing import Any

from shoal._training import failure_text


class ScriptEnd:
    """Closes something at the end of the script, with the uncaught exception that ends the script as its error.

    Python clears a SystemExit before, so `sys.exit(1)` seems to be a success here: only a `with` block sees it. In an
    interactive interpreter, the last exception may be that of any earlier statement, so it says nothing about the end.

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
        failure = None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)
        self._close(failure_text(failure) if failure else "")


__all__ = ["ScriptEnd"]
