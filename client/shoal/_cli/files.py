"""Files that commands write: the file that FILE names, or standard output if FILE is `-`."""

import sys
from pathlib import Path

from shoal import errors

# The name for standard output. A command in a container can deliver a file there.
STDOUT = Path("-")


def check_writable(file: Path) -> None:
    """Checks that a command can write a file, as far as this is known before the values are read.

    Raises:
        BadRequest: the file cannot be written.
    """
    if file == STDOUT:
        obstacle = "standard output is a terminal" if sys.stdout.isatty() else ""
    elif file.is_dir():
        obstacle = "it is a folder"
    else:
        obstacle = "" if file.parent.is_dir() else f"there is no folder {file.parent}"
    if obstacle:
        raise cannot_write(file, obstacle)


def cannot_write(file: Path, why: str) -> errors.BadRequest:
    """Returns the error for a file that cannot be written."""
    return errors.BadRequest(f"cannot write {file}: {why}; name a file in a folder that you may write to", file=file)


__all__ = ["STDOUT", "cannot_write", "check_writable"]
