"""End of the user's script: with which exception it fails, if it does."""

import sys

from shoal._training import failure_text


def failure_of(error: BaseException | None) -> str:
    """Returns the text of the exception that ends a script, or a `with` block. "" means that it has succeeded.

    `sys.exit()` and `sys.exit(0)` are successes.
    """
    if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
        return ""
    return failure_text(error)


def failure_at_exit() -> str:
    """Returns what `failure_of` returns for the script, as far as a function of `atexit` can know.

    Python keeps only an uncaught exception until then. It clears a SystemExit before, so `sys.exit(1)` seems to be a
    success: only a `with` block sees it. In an interactive interpreter or a notebook, the last exception may be that of
    any earlier statement. It says nothing about the end, which counts as a success.
    """
    return "" if hasattr(sys, "ps1") else failure_of(getattr(sys, "last_value", None))


__all__ = ["failure_at_exit", "failure_of"]
