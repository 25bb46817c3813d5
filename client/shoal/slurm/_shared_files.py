"""Files on a file system that nodes share, whose server may fail for a moment: it starts again, or is overloaded."""

import errno
import time
from collections.abc import Callable
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


__all__ = ["patiently"]
