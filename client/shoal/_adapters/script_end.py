"""End of the user's script, for objects that no `with` block closes."""

import atexit
from collections.abc import Callable
from typing import Any

from shoal import errors
from shoal._system.logs import Log
from shoal._training import failure_at_exit

_log = Log(__name__)


class ScriptEnd:
    """Closes something at the end of the script, with the failure of the script as far as `failure_at_exit` knows it.

    Args:
        close: called with the text of the exception; "" means that there is none.
    """

    def __init__(self, close: Callable[[str], Any]) -> None:
        self._close = close
        atexit.register(self._at_exit)

    def over(self) -> None:
        """Removes the call at the end of the script."""
        atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        try:
            self._close(failure_at_exit())
        except errors.ShoalError as error:  # nobody can catch it any more, and the user's own error came before
            _log.warning("the session could not be closed at the end of the program", reason=error.message)


__all__ = ["ScriptEnd"]
