"""Finding files, by path, pattern, folder or URL, in an order that is the same everywhere. Not what is in them."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

from shoal import errors
from shoal._system import load

# A path, a pattern, a folder or a URL, or several of them.
Where: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that was there when it was looked for.

    Attributes:
        name: as messages tell it: a path, or a URL.
        path: within its file system.
        size: bytes.
        system: fsspec's file system; None: this machine's own.
    """

    name: str
    path: str
    size: int
    system: Any = None

    def open(self) -> BinaryIO:
        """The file, to be read from any position.

        Raises:
            InvalidData: it cannot be opened (any more).
        """
        with errors_naming(self.name):
            opened: BinaryIO = open(self.path, "rb") if self.system is None else self.system.open(self.path, "rb")  # noqa: SIM115 - the caller closes it
            return opened


@contextmanager
def errors_naming(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turns what reading a file raises into an error that names the file.

    Args:
        name: of the file, and of the place in it.
        kinds: further exceptions that mean that the content is no good.
    """
    try:
        yield
    except errors.ShoalError:
        raise
    except FileNotFoundError:
        raise errors.InvalidData(
            f"{name} is not there (any more); look at the path, and at who removes files"
        ) from None
    except PermissionError:
        raise errors.InvalidData(f"{name} may not be read; give the worker's user the right to") from None
    except Exception as error:
        if not isinstance(error, (OSError, EOFError, *kinds)):
            raise
        reason = " ".join(str(error).split())
        raise errors.InvalidData(
            f"{name} cannot be read: {reason}; it may be damaged or cut short: compare it with its source, or copy it "
            "again"
        ) from None


def find(where: Where, suffixes: Sequence[str], who: str) -> list[DataFile]:
    """The files, by name.

    Args:
        where: paths, patterns (`*`, `?`, `[...]`, `**`), folders or URLs. Of folders, and the folders in them, the
            files with these suffixes count, but for those whose names begin with a dot or an underscore.
        suffixes: ".parquet"; where a file is named, it may have any.
        who: asks, for messages.

    Raises:
        InvalidData: a path is not there, a pattern or folder has no file, or a file comes twice.
        ImportError: a URL was given, and fsspec is not installed.
    """
    items = [where] if isinstance(where, str | os.PathLike) else list(where)
    if not items:
        raise errors.InvalidData(f"{who} was given no files; give a path, a pattern, a folder, or a list of these")
    found: dict[str, DataFile] = {}
    for item in [os.fspath(each) for each in items]:
        files = _remote(item, suffixes, who) if "://" in item else _local(item, suffixes)
        if not files:
            raise errors.InvalidData(f"{who}: no file is at {item}; look at the path, or the pattern")
        for file in files:
            if found.setdefault(file.name, file) is not file:
                raise errors.InvalidData(f"{who}: {file.name} is named twice; leave one out of the list of files")
    return [found[name] for name in sorted(found)]


def _local(item: str, suffixes: Sequence[str]) -> list[DataFile]:
    if os.path.isdir(item):
        paths: Iterable[str] = (
            str(path) for path in Path(item).rglob("*") if _counts(str(path.relative_to(item)), suffixes)
        )
    elif os.path.exists(item) or not glob.has_magic(item):
        paths = [item]
    else:
        paths = glob.glob(item, recursive=True)
    return [DataFile(path, path, os.path.getsize(path)) for path in paths if os.path.isfile(path)]


def _remote(item: str, suffixes: Sequence[str], who: str) -> list[DataFile]:
    fsspec = load("fsspec.core", f"{who} at {item}")
    with errors_naming(item, ValueError):  # an unknown protocol
        system, path = fsspec.url_to_fs(item)
        if glob.has_magic(path) and not system.exists(path):
            infos = system.glob(path, detail=True)
        elif system.isdir(path):
            inside = system.find(path, detail=True)
            start = len(path.rstrip("/")) + 1
            infos = {name: info for name, info in inside.items() if _counts(name[start:], suffixes)}
        else:
            infos = {path: system.info(path)} if system.exists(path) else {}
    return [
        DataFile(system.unstrip_protocol(name), name, int(info["size"] or 0), system)
        for name, info in infos.items()
        if info["type"] == "file"
    ]


def _counts(relative: str, suffixes: Sequence[str]) -> bool:
    hidden = any(part.startswith((".", "_")) for part in relative.replace(os.sep, "/").split("/"))
    return not hidden and relative.endswith(tuple(suffixes))


__all__ = ["DataFile", "Where", "errors_naming", "find"]
