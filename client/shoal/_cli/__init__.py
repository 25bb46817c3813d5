"""The `shoal` command: a terminal interface to `shoal.Client`. `token`, `certs` and `page` have no Python interface."""

import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

_INTERRUPTED = 130  # as in shoal._system.exit_codes, which is not loaded yet


def main() -> None:
    """Runs the command line of this process. This is the entry point of `shoal`."""
    _end_at_interrupts()
    if os.getpid() == 1:
        # The kernel has no default action for signals of a container's first process: SIGTERM would have no effect.
        # Roles install better handlers once they have loaded.
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    run = load()
    _raise_at_interrupts()
    try:
        run()
    finally:
        _end_at_interrupts()


def load() -> "Callable[[], None]":
    """Loads the commands. Returns the function that runs the command that this process's arguments name."""
    from shoal import errors  # noqa: PLC0415 - the imports of a command take up to two seconds: see _end_at_interrupts
    from shoal._memory import allocator, gc_control  # noqa: PLC0415
    from shoal._system import hidden  # noqa: PLC0415

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
    return lambda: app(prog_name="shoal")


def _end_at_interrupts() -> None:
    """Makes Ctrl-C end this process at once, without a traceback, while commands are loaded and after they have ended.

    In a script's background process, the shell has switched Ctrl-C off, and it stays off.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _exit)


def _raise_at_interrupts() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again, so that a command can clean up."""
    if signal.getsignal(signal.SIGINT) is _exit:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _exit(_number: int, _frame: object) -> None:
    os._exit(_INTERRUPTED)


__all__ = ["load", "main"]
