"""The `shoal` command: a terminal interface to `shoal.Client`. Python code can do everything that the command does."""

import os
import signal
import sys

from shoal import errors
from shoal._memory import allocator, gc_control
from shoal._system import hidden


def main() -> None:
    """Runs the command line of this process. This is the entry point of `shoal`."""
    if os.getpid() == 1:
        # The kernel has no default action for signals of a container's first process: SIGTERM would have no effect.
        # Roles install better handlers once they have loaded.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        allocator.tune()
    except errors.BadRequest as error:
        sys.stderr.write(f"error: {error.message}\n")
        raise SystemExit(2) from None
    with gc_control.frozen_from_gc():
        with hidden("rich"):  # which structlog would use for tracebacks, in color
            import structlog  # noqa: PLC0415 - a slow import, inside the block

        from shoal._cli.app import app  # noqa: PLC0415 - loads gRPC, after the allocator is tuned

    # Standard output is for a command's result. Roles configure their own logs later.
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(sys.stderr))
    app(prog_name="shoal")


__all__ = ["main"]
