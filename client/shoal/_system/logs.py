"""Loggers of modules that run in roles and in users' processes.

A role writes structured lines as its options say. In a user's process, messages go to the standard library's logger
`shoal`: warnings go to standard error, unless the program configures `logging` otherwise.
"""

import logging

import structlog

from shoal._system.terminal import printable

_LOG = logging.getLogger("shoal")


class Log:
    """A logger of one module, which decides at each message where it goes.

    If the process has configured structlog, as roles do, messages go there. Otherwise they go to the logger `shoal`, as
    one line with the fields in parentheses.

    Args:
        name: name of the module.
    """

    def __init__(self, name: str) -> None:
        self._structured = structlog.get_logger(name)

    def debug(self, event: str, **fields: object) -> None:
        """Writes a message that helps to find defects."""
        self._write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        """Writes a message about normal operation."""
        self._write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        """Writes a message about something that a person may have to change."""
        self._write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        """Writes a message about something that does not work."""
        self._write("error", event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """Writes a message with the traceback of the exception that is being handled."""
        self._write("exception", event, fields)

    def _write(self, method: str, event: str, fields: dict[str, object]) -> None:
        if structlog.is_configured():
            getattr(self._structured, method)(event, **fields)
        else:
            shown = ", ".join(f"{name}={value}" for name, value in fields.items())
            getattr(_LOG, method)("%s", printable(f"{event} ({shown})" if shown else event))


__all__ = ["Log"]
