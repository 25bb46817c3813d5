"""Structured logs of a role's process and of a trainer.

A trainer loads this module without the rest of a role's process, which it does not need.
"""

import logging
import sys
from typing import Any

import structlog

from shoal._system.terminal import printable

# Levels of nested values of a log line in which texts are found.
_DEEPEST = 8


def configure_logging(log_format: str, level: str, **identity: str) -> None:
    """Configures structured logs on standard error.

    Args:
        log_format: `console` for people, or `json` for one object per line.
        level: debug, info, warning or error.
        identity: fields of every line of all threads: the role, and the member's name.
    """

    def identify(
        _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        return {**identity, **event}

    processors: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        identify,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if log_format == "json":
        processors += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        # Its default shows the local variables of each frame, which may be secrets, where rich is installed.
        plain = structlog.dev.plain_traceback
        console = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=plain)
        # Tracebacks become text before, because the messages of exceptions have control characters as other texts do.
        processors += [structlog.processors.format_exc_info, _without_controls, console]
    structlog.configure(
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),  # one write per line, because roles share a terminal
    )


def _without_controls(
    _logger: structlog.typing.WrappedLogger, _method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Leaves out what a terminal would act on. Reasons of jobs, for example, come from other processes."""
    return {key: _printable(value, _DEEPEST) for key, value in event.items()}


def _printable(value: Any, levels: int) -> Any:
    """Returns a value of a log line, with all its texts without control characters. Other values stay as they are.

    Only an object of an unknown class whose `repr` has such characters becomes a text, and what is nested deeper than
    `levels`.
    """
    if isinstance(value, str):
        return printable(value)
    if levels and type(value) is dict:
        return {_printable(key, levels - 1): _printable(item, levels - 1) for key, item in value.items()}
    if levels and type(value) in (list, tuple, set, frozenset):
        return type(value)(_printable(item, levels - 1) for item in value)
    text = repr(value)
    return value if printable(text) == text else printable(text)


__all__ = ["configure_logging"]
