"""Files that commands write: FILE or, as -, standard output."""

import sys
from pathlib import Path

from shoal import errors

# The name for standard output, by which a container can deliver a file.
STDOUT = Path("-")


def check_writable(file: Path) -> None:
    """Checks, before the values are read, what is known about a file that a command will write.

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
