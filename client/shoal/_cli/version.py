"""The command `version`, which also implements `shoal --version`."""

from dataclasses import asdict

from shoal._cli import options
from shoal._cli.output import Output
from shoal._system import build


def version(as_json: options.JsonOption = False) -> None:
    """Prints the version and commit of Shoal, and the versions of Python and of the main libraries."""
    with Output(as_json) as out:
        found = build.current()
        out.message(str(found), asdict(found))


__all__ = ["version"]
