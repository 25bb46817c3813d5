"""Private folders of processes: certificates and keys, and the store of a coordinator.

The folder of a role survives a restart on the same node, under another name. It is removed when the role stops, and
also some time after its process and the whole cluster were killed. Takeover and removal both start with a rename, so
only one can win.
"""

import os
import secrets
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from shoal import errors
from shoal._system import private_files

_RANDOM_BYTES = 8
# By the folders of this process: the ends of the pipes for which their shells wait, and what holds the folders.
_held: dict[Path, tuple[int, int]] = {}
# A shell that waits for the end of its standard input, which is a pipe from the process that owns the folder. Then it
# removes the folder, unless another process renames it in time. An engine kills the children of a process, so the
# shell is no child: the one that is started ends at once.
_WATCH = """
exec 3<&0
(
  read -r _ <&3
  left=$2
  while [ -d "$1" ] && [ "$left" -gt 0 ]; do
    sleep 1
    left=$((left - 1))
  done
  mv "$1" "$1.removed" && rm -rf "$1.removed"
) >/dev/null 2>&1 &
"""


def claim(name: str, files: Mapping[str, bytes], kept_s: int) -> Path:
    """Creates a folder that only this user can enter, or takes over that of a process that has ended.

    Args:
        name: beginning of the folder's name, the same for the process that takes it over.
        files: the content of its files, by their names. Only this user can read them.
        kept_s: seconds for which the folder is kept after the end of this process, so that another one can take it
            over.

    Raises:
        StartFailed: the folder cannot be written.
    """
    parent = Path(tempfile.gettempdir()).resolve()
    folder = parent / f"{name}.{secrets.token_hex(_RANDOM_BYTES)}"
    try:
        if not any(_taken_over(earlier, folder) for earlier in parent.glob(f"{name}.{'?' * 2 * _RANDOM_BYTES}")):
            folder.mkdir(mode=0o700)
        for file, content in files.items():
            (folder / file).unlink(missing_ok=True)
            with open(private_files.create(folder / file), "wb") as opened:
                opened.write(content)
        _watch(folder, kept_s)
    except OSError as error:
        raise errors.StartFailed(
            f"cannot write the private folder {folder}: {error.strerror}; set TMPDIR for the "
            "engine's processes on this node to a folder with space"
        ) from None
    return folder


def release(folder: Path) -> None:
    """Removes a folder, and ends its shell."""
    shutil.rmtree(folder, ignore_errors=True)
    for descriptor in _held.pop(folder, ()):
        os.close(descriptor)


def _taken_over(earlier: Path, folder: Path) -> bool:
    """Renames a folder that only this user can enter. Returns False if it is not such a folder, or has been removed."""
    with suppress(FileNotFoundError):
        found = earlier.lstat()
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077:
            earlier.rename(folder)
            return True
    return False


def _watch(folder: Path, kept_s: int) -> None:
    lock = private_files.hold(folder)
    reading, writing = os.pipe()  # the end for writing is closed when this process ends, in any way
    _held[folder] = writing, lock
    command = ["/bin/sh", "-c", _WATCH, "sh", str(folder), str(kept_s)]
    subprocess.run(command, stdin=reading, start_new_session=True, cwd="/", check=True)  # noqa: S603 - our own
    os.close(reading)


__all__ = ["claim", "release"]
