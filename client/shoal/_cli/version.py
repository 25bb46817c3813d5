"""The command that says what runs: version; and what `shoal --version` prints."""

from dataclasses import asdict

from shoal._cli import options
from shoal._cli.output import Output
from shoal._system import build


def version(as_json: options.JsonOption = False) -> None:
    """Prints the version and commit of Shoal, and the versions of Python and of the libraries that matter most."""
    with Output(as_json) as out:
        found = build.current()
        out.say(str(found), asdict(found))


__all__ = ["version"]
