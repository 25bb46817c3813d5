"""Files that a cluster keeps for one user: where they lie, and their permissions.

They are the store and checkpoints, which hold users' models and settings, and the files of keys and tokens.

Only the user that a role runs as can access the files that the role creates. `SHOAL_FILE_ACCESS=group` also gives
access to the group of the folder, for roles that share a volume under several user ids. Files that already exist keep
their permissions.
"""

import fcntl
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shoal import errors
from shoal._system.site import docs_url

VARIABLE = "SHOAL_FILE_ACCESS"
# The mode of a file for each value of the variable. Those who may read a folder may also enter it.
_MODES = {"owner": 0o600, "group": 0o660}


def file_mode(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the mode of new files.

    Raises:
        BadRequest: the environment variable has another value.
    """
    access = environment.get(VARIABLE, "") or "owner"
    if access not in _MODES:
        raise errors.BadRequest(f"{VARIABLE} is {access!r}; use one of: {', '.join(_MODES)}", variable=VARIABLE)
    return _MODES[access]


def folder_mode(environment: Mapping[str, str] = os.environ) -> int:
    """Returns the mode of new folders.

    Raises:
        BadRequest: the environment variable has another value.
    """
    mode = file_mode(environment)
    return mode | (mode & 0o444) >> 2


def make_folder(folder: Path) -> None:
    """Creates a folder, and those above it, if they do not exist.

    Raises:
        OSError: it cannot be created.
        BadRequest: see `folder_mode`.
    """
    mode = folder_mode()
    for missing in reversed([each for each in (folder, *folder.parents) if not each.exists()]):
        with suppress(FileExistsError):
            missing.mkdir(mode=0o700)
            missing.chmod(mode)  # the process's umask does not apply to what the operator asked for


def hold(folder: Path) -> int:
    """Returns a descriptor with a lock: until it is closed, systemd-tmpfiles keeps old files here (tmpfiles.d(5))."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with suppress(OSError):  # not all file systems have locks
        fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def state_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder for the state of this user's clusters, by the XDG base directory specification."""
    # The specification says to ignore relative paths.
    home = environment.get("XDG_STATE_HOME", "")
    base = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    return base / "shoal"


def check_secret(what: str, file: Path, status: os.stat_result, refusal: type[errors.ShoalError]) -> None:
    """Checks that a file with a key or a token is private. The rule is that of PostgreSQL.

    The file belongs to this user or to root, and only its owner can access it. There are two exceptions. If this user
    is not root, the group of a file of root may read it: the files of a Kubernetes secret belong to root, and their
    group is the pod's `fsGroup`. With `SHOAL_FILE_ACCESS=group`, the group may read and write.

    Args:
        what: names the file in the message.
        file: its path, for the message.
        status: its owner and its mode.
        refusal: the class of the error.

    Raises:
        ShoalError: `refusal`, because others can read or change the file.
        BadRequest: see `file_mode`.
    """
    user, owner, mode = os.geteuid(), status.st_uid, stat.S_IMODE(status.st_mode)
    of_secret = stat.S_IRGRP if owner == 0 != user else 0
    forbidden = mode & (stat.S_IRWXG | stat.S_IRWXO) & ~(file_mode() | of_secret)
    if forbidden or owner not in (user, 0) or not stat.S_ISREG(status.st_mode):
        raise refusal(
            f"{what} {file} is not private: it belongs to user {owner} and has the mode {mode:o}, so others than user "
            f"{user} can read or change it. Make another one, because others may have read this one, store it as user "
            f"{user}, and run: chmod 600 {file}. {docs_url('how-to/security')} says when its group may read it",
            file=file,
        )


def read_secret(what: str, file: Path, refusal: type[errors.ShoalError], most: int = -1) -> bytes:
    """Returns the content of a file with a key or a token, if the file is private.

    Args:
        what: names the file in the message.
        file: its path.
        refusal: the class of the error.
        most: the largest number of bytes to read. A negative number means no limit.

    Raises:
        OSError: the file cannot be read.
        ShoalError: see `check_secret`.
    """
    with open(os.open(file, os.O_RDONLY | os.O_CLOEXEC), "rb") as opened:
        # Of the open file, because the path may name another file by now.
        check_secret(what, file, os.fstat(opened.fileno()), refusal)
        return opened.read(most)


def create(file: Path, mode: int = 0o600) -> int:
    """Creates a file for writing, and returns its descriptor.

    Raises:
        FileExistsError: there is one already.
        OSError: it cannot be created.
    """
    return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


__all__ = [
    "VARIABLE",
    "check_secret",
    "create",
    "file_mode",
    "folder_mode",
    "hold",
    "make_folder",
    "read_secret",
    "state_folder",
]
