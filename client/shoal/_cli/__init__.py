"""The `shoal` command. It translates between a terminal and `shoal.Client`; what it can do, Python can do too."""

from shoal._cli.app import app


def main() -> None:
    """Runs the command line of this process; the entry point of `shoal`."""
    app(prog_name="shoal")


__all__ = ["app", "main"]
