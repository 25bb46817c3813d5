"""The search for files by path, pattern, folder or URL, in an order that is the same on every worker."""

import glob
import gzip
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeAlias

import numpy as np

from shoal import errors
from shoal._system import check_type, docs_url, load

# A path, a pattern, a folder or a URL, or several of them.
Where: TypeAlias = "str | os.PathLike[str] | Sequence[str | os.PathLike[str]]"


# The largest ratio of deflate, 258 bytes in two bits. A file whose header promises more is damaged.
MOST_DEFLATED = 1032
_PIECE = 1 << 20  # bytes that are decompressed at a time


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file that the search has found.

    Attributes:
        name: path or URL, for messages.
        path: path within its file system.
        size: size in bytes.
        system: fsspec file system. None means the local file system.
    """

    name: str
    path: str
    size: int
    system: Any = None

    def open(self) -> BinaryIO:
        """Opens the file for reading from any position. The caller closes it.

        Raises:
            InvalidData: the file cannot be opened.
        """
        with errors_naming(self.name):
            opened: BinaryIO = open(self.path, "rb") if self.system is None else self.system.open(self.path, "rb")  # noqa: SIM115 - the caller closes it
            return opened


@contextmanager
def errors_naming(name: str, *kinds: type[Exception]) -> Iterator[None]:
    """Converts exceptions from reading a file to an error that names the file.

    Args:
        name: name of the file, and the position in it.
        kinds: further exceptions that mean that the content is invalid.

    Raises:
        InvalidData: the file cannot be read.
    """
    try:
        yield
    except errors.ShoalError:
        raise
    except FileNotFoundError:
        raise errors.InvalidData(
            f"{name} does not exist (any more); check the path, and whether another process removes files"
        ) from None
    except PermissionError:
        if "://" in name:
            raise errors.InvalidData(f"the object store refuses to read {name}; {_give_keys()}") from None
        raise errors.InvalidData(f"the worker's user may not read {name}; give it permission") from None
    except Exception as error:
        if "://" in name and "Credential" in type(error).__name__:  # each store's package has a type of its own
            raise errors.InvalidData(f"{name} cannot be read: {error}; {_give_keys()}") from None
        if not isinstance(error, (OSError, EOFError, *kinds)):
            raise
        reason = " ".join(str(error).split())
        raise errors.InvalidData(
            f"{name} cannot be read: {reason}; it may be damaged or truncated: compare it with its source, or copy it "
            "again"
        ) from None


def read_into(file: IO[bytes] | gzip.GzipFile, target: np.ndarray) -> int:
    """Fills memory from a compressed file, and returns the number of bytes; fewer than wanted if the file ends.

    Args:
        file: the file.
        target: flat uint8 array. Its memory is used only as far as the file goes.
    """
    done = 0
    while done < target.size:
        piece = file.read(min(_PIECE, target.size - done))
        if not piece:
            break
        target[done : done + len(piece)] = np.frombuffer(piece, np.uint8)
        done += len(piece)
    return done


def find(where: Where, suffixes: Sequence[str], who: str) -> list[DataFile]:
    """Finds files, and returns them in the order of their names.

    Args:
        where: paths, patterns (`*`, `?`, `[...]`, `**`), folders or URLs. Folders are searched recursively for files
            with the given suffixes, except files whose names start with a dot or an underscore.
        suffixes: suffixes such as ".parquet". A file that is named itself may have any suffix.
        who: name of the data set, for messages.

    Raises:
        BadRequest: `where` is not a path or a list of paths.
        InvalidData: a path does not exist, a pattern or folder has no file, or a file occurs twice.
        ImportError: a URL is given, but fsspec is not installed.
    """
    give = "a path, a pattern, a folder, or a list of these, such as 'data/*.parquet'"
    check_type(f"the first argument of {who}", where, (str, os.PathLike, Iterable), give)
    items = [where] if isinstance(where, str | os.PathLike) else list(where)
    if not items:
        raise errors.InvalidData(f"{who} was given no files; give a path, a pattern, a folder, or a list of these")
    for each in items:
        check_type(f"a file of {who}", each, (str, os.PathLike), give)
    found: dict[str, DataFile] = {}
    for item in [os.fspath(each) for each in items]:
        files = _remote(item, suffixes, who) if "://" in item else _local(item, suffixes)
        if not files:
            raise errors.InvalidData(f"{who}: there is no file at {item}; check the path or the pattern")
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
    with errors_naming(item, TypeError, ValueError):  # an unknown protocol, or one that needs more than a URL, as ftp
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


__all__ = ["MOST_DEFLATED", "DataFile", "Where", "errors_naming", "find", "read_into"]


def _give_keys() -> str:
    """Returns what to do if the keys of an object store are missing. A trainer does not inherit those of its worker."""
    return (
        "give this process keys that may read it; a worker passes its own keys to programs only if its options name "
        "them, such as --trainer-env AWS_ACCESS_KEY_ID --trainer-env AWS_SECRET_ACCESS_KEY "
        f"({docs_url('how-to/data')})"
    )
