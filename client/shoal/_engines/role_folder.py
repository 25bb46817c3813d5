"""Private folders of processes: certificates and keys, and the store of a coordinator.

The folder of a role survives a restart on the same node. It is removed when the role stops, and also some time after
its process and the whole cluster were killed.
"""

import os
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from shoal import errors
from shoal._system import private_files

_OWNER = "owner"
# A shell that waits for the end of its standard input, which is a pipe from the process that owns the folder. Then it
# removes the folder, unless another process takes it over in time. An engine kills the children of a process, so the
# shell is no child: the one that is started ends at once.
_WATCH = """
exec 3<&0
(
  read -r _ <&3
  left=$3
  while [ "$left" -gt 0 ]; do
    [ "$(cat "$1/owner" 2>/dev/null)" = "$2" ] || exit 0
    sleep 1
    left=$((left - 1))
  done
  rm -rf "$1"
) >/dev/null 2>&1 &
"""


def claim(name: str, files: Mapping[str, bytes], kept_s: int) -> Path:
    """Creates a folder that only this user can enter, or takes over that of a process that has ended.

    Args:
        name: name of the folder, which nobody else can guess.
        files: the content of its files, by their names. Only this user can read them.
        kept_s: seconds for which the folder is kept after the end of this process, so that another one can take it
            over.

    Raises:
        StartFailed: the folder belongs to another user, or cannot be written.
    """
    folder = Path(tempfile.gettempdir()).resolve() / name
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or folder.is_symlink():
            raise errors.StartFailed(f"the folder {folder} is not private; remove it")
        owner = secrets.token_hex(8)
        for file, content in {**files, _OWNER: owner.encode()}.items():
            (folder / file).unlink(missing_ok=True)
            with open(private_files.create(folder / file), "wb") as opened:
                opened.write(content)
        _watch(folder, owner, kept_s)
    except OSError as error:
        raise errors.StartFailed(
            f"cannot write the private folder {folder}: {error.strerror}; set TMPDIR on this node"
        ) from None
    return folder


def release(folder: Path) -> None:
    """Removes a folder."""
    shutil.rmtree(folder, ignore_errors=True)


def _watch(folder: Path, owner: str, kept_s: int) -> None:
    reading, _writing = os.pipe()  # the end for writing is closed when this process ends, in any way
    command = ["/bin/sh", "-c", _WATCH, "sh", str(folder), owner, str(kept_s)]
    subprocess.run(command, stdin=reading, start_new_session=True, cwd="/", check=True)  # noqa: S603 - our own
    os.close(reading)


__all__ = ["claim", "release"]
