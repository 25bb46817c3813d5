"""The help of commands: its layout, and its examples. Only `_cli` and the generator of the reference import it."""

from shoal._cli.help.examples import EXAMPLES
from shoal._cli.help.text import command_path, help_lines

__all__ = ["EXAMPLES", "command_path", "help_lines"]
