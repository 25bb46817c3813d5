"""The `shoal` command. It translates between a terminal and `shoal.Client`; what it can do, Python can do too."""

import os
import signal
import sys

from shoal import errors
from shoal._memory import allocator, gc_control


def main() -> None:
    """Runs the command line of this process; the entry point of `shoal`."""
    if os.getpid() == 1:
        # The kernel gives the first process of a container no default: told to stop, it would not. Roles have a better
        # answer, once they have loaded.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    try:
        allocator.tune()
    except errors.BadRequest as error:
        sys.stderr.write(f"error: {error.message}\n")
        raise SystemExit(2) from None
    with gc_control.frozen_from_gc():
        import structlog  # noqa: PLC0415 - it takes a while, too

        from shoal._cli.app import app  # noqa: PLC0415 - it loads gRPC, which must find the allocator as it will be

    # Standard output is a command's answer, for scripts and files. Roles say later how they log.
    structlog.configure(logger_factory=structlog.WriteLoggerFactory(sys.stderr))
    app(prog_name="shoal")


__all__ = ["main"]
