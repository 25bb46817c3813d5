"""Files on a file system that nodes share, whose server may fail for a moment: it starts again, or is overloaded."""

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

_Result = TypeVar("_Result")
_PASSING = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.ESHUTDOWN, errno.EREMOTEIO}
# How often an action is repeated, and the seconds before each repetition.
_REPEATS, _PAUSE_S = 20, 1.0


def patiently(action: Callable[[], _Result]) -> _Result:
    """Does something with files, and repeats it for 20 s while the file server fails. Returns its result.

    Raises:
        OSError: another error, or the server still fails.
    """
    for _ in range(_REPEATS):
        try:
            return action()
        except OSError as error:
            if error.errno not in _PASSING:
                raise
        time.sleep(_PAUSE_S)
    return action()


def files_in(folder: Path, beginning: str = "") -> list[Path]:
    """Returns the files of a folder whose names have a beginning, in order; none if the folder is missing.

    Unlike `Path.glob` of some versions of Python, it does not take an error for the end of the folder.

    Raises:
        OSError: the folder cannot be read now.
    """
    try:
        return sorted(folder / name for name in os.listdir(folder) if name.startswith(beginning))
    except FileNotFoundError:
        return []


__all__ = ["files_in", "patiently"]
