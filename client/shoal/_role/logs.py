"""Structured logs of a role's process and of a trainer.

A trainer loads this module without the rest of a role's process, which it does not need.
"""

import logging
import sys

import structlog

from shoal._system.terminal import printable


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
    return {key: printable(value if isinstance(value, str) else repr(value)) for key, value in event.items()}


__all__ = ["configure_logging"]
