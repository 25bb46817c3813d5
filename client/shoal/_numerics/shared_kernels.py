"""Compiled kernels in the user's cache folder, so that a new environment does not compile them again.

Numba caches the machine code of a kernel beside its source file, and each environment has its own copy of that file.
This module copies the machine code between that cache and a folder that all environments of a user share. Numba itself
checks whether the code is of the same source, version and processor, and compiles again otherwise.

Numba's files can run code when they are loaded. So only a folder that belongs to this user, and that nobody else can
write to, is used.
"""

import hashlib
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

# Folders for the versions of one source file. The oldest ones are removed.
MOST_VERSIONS = 4
_PRIVATE = 0o700
_ENDINGS = (".nbc", ".nbi")  # the index is last, because it names the others


def shared_folder(dispatcher: Any, environ: Mapping[str, str] = os.environ) -> Path | None:
    """Returns the folder that the environments of this user share for a kernel's source file, which is made if needed.

    Args:
        dispatcher: the kernel.
        environ: the environment variables.

    Returns:
        The folder. None if the user has chosen a cache with NUMBA_CACHE_DIR, or if there is no folder that is safe.
    """
    if "NUMBA_CACHE_DIR" in environ:
        return None
    try:
        source = Path(dispatcher.py_func.__code__.co_filename)
        root = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shoal" / "kernels"
        versions = f"{getattr(sys.modules.get('numba'), '__version__', '')} {sys.implementation.cache_tag} "
        key = hashlib.sha256(versions.encode() + source.read_bytes()).hexdigest()[:16]
        folder = root / f"{source.stem}-{key}"
        folder.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
        found = folder.stat()
    except (OSError, RuntimeError):  # no home, or a full or read-only disk
        return None
    mine = found.st_uid == os.geteuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    return folder if mine else None


def take(dispatcher: Any, shared: Path) -> None:
    """Copies the machine code of a kernel from the shared folder to Numba's cache, if that has none."""
    own = Path(dispatcher.stats.cache_path)
    if not any(files_of(dispatcher, own)):
        with suppress(OSError):
            own.mkdir(parents=True, exist_ok=True)
            _copy(dispatcher, shared, own)


def give(dispatcher: Any, shared: Path) -> None:
    """Copies the machine code of a kernel from Numba's cache to the shared folder, and removes old versions there."""
    with suppress(OSError):
        _copy(dispatcher, Path(dispatcher.stats.cache_path), shared)
        stem = shared.name.rpartition("-")[0]
        versions = sorted(shared.parent.glob(f"{stem}-*"), key=lambda it: it.stat().st_mtime)
        for old in versions[:-MOST_VERSIONS]:
            shutil.rmtree(old, ignore_errors=True)


def files_of(dispatcher: Any, folder: Path) -> Iterator[Path]:
    """Yields the files of a kernel in a cache folder of Numba, the index last."""
    source = Path(dispatcher.py_func.__code__.co_filename)
    beginning = f"{source.stem}.{dispatcher.py_func.__qualname__}-"
    for ending in _ENDINGS:
        yield from folder.glob(f"{beginning}*{ending}")


def _copy(dispatcher: Any, source: Path, target: Path) -> None:
    for file in files_of(dispatcher, source):
        descriptor, unfinished = tempfile.mkstemp(dir=target)
        os.close(descriptor)
        try:
            shutil.copyfile(file, unfinished)
            os.replace(unfinished, target / file.name)
        except BaseException:
            os.unlink(unfinished)
            raise


__all__ = ["MOST_VERSIONS", "files_of", "give", "shared_folder", "take"]
