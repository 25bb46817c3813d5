"""Checkpoint storage in an object store, at any URL that fsspec supports. Only S3 has settings of its own here.

An object appears when its upload is completed, so writes are atomic. Credentials, endpoints and regions come from the
environment, where each store's package looks for them. They are never in a URL or in a message.
"""

import importlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from shoal import errors
from shoal._checkpoint.storage import TEMPORARY, StorageFile, checked, is_name, missing
from shoal._wire import Buffer

# Size of the parts of an upload, which are buffered in memory. S3 allows 10,000 parts.
PART_BYTES = 16 << 20

_PASSWORD = re.compile(r"//[^/\s]*@")  # credentials in an endpoint's URL, which an error may quote
# Timeouts in seconds, and botocore's attempts, with pauses of a few seconds in all.
_S3: Mapping[str, Any] = {
    "config_kwargs": {
        "connect_timeout": 5,
        "read_timeout": 30,
        "retries": {"total_max_attempts": 3, "mode": "standard"},
    },
    "fixed_upload_size": True,  # some S3-compatible stores require parts of equal size
}
# How often s3fs repeats a call after botocore's attempts. botocore does not repeat a call whose response breaks off.
_S3_ROUNDS = 2
# Stores whose files appear when they are closed, and whose uploads can be aborted. In others, a file is renamed.
_UPLOADS = ("s3", "s3a", "gs", "gcs")
OPTIONS: Mapping[str, Mapping[str, Any]] = {"s3": _S3, "s3a": _S3}


class ObjectStore:
    """Checkpoint storage in a bucket of an object store, or below a prefix in it.

    Args:
        url: SCHEME://BUCKET or SCHEME://BUCKET/PREFIX. memory://PREFIX is the memory of this process, for tests.

    Raises:
        BadRequest: the URL is invalid or contains credentials, or the store's package is not installed.
    """

    def __init__(self, url: str) -> None:
        self._scheme, _, rest = url.partition("://")
        if "@" in rest:
            raise errors.BadRequest(
                f"the checkpoint URL ({self._scheme}://...) contains an '@'; put credentials and accounts "
                "into the environment, where the store's own tools look for them"
            )
        names = [checked(name) for name in rest.removesuffix("/").split("/")]
        self.url = f"{self._scheme}://{'/'.join(names)}"
        self._system = open_file_system(self._scheme, self.url)
        self._root: str = self._system._strip_protocol(self.url)

    @property
    def file_system(self) -> Any:
        """fsspec's file system of the store, an `AbstractFileSystem`."""
        return self._system

    def write(self, path: Sequence[str], pieces: Iterable[Buffer]) -> None:
        """See `CheckpointStorage.write`. An error aborts the upload."""
        with self._failing("written", path):
            upload = (_Upload if self._scheme in _UPLOADS else _Move)(self._system, self._path(path))
        try:
            for piece in pieces:  # errors of the iterator are not the store's
                with self._failing("written", path):
                    upload.file.write(piece)
            with self._failing("written", path):
                upload.complete()
        except BaseException:
            with suppress(Exception):  # the first error is reported
                upload.abort()
            raise

    @contextmanager
    def open(self, path: Sequence[str]) -> Iterator[StorageFile]:
        """See `CheckpointStorage.open`."""
        where = self._path(path)
        try:
            with self._failing("read", path, unless_missing=True):
                info = self._system.info(where)
        except FileNotFoundError:
            raise missing(self.url, path) from None
        if info["type"] != "file":
            raise errors.StorageFailed(f"{self._name(path)} could not be read: it is not a file", path="/".join(path))
        yield _Object(self, path, where, int(info["size"]))

    def names(self, path: Sequence[str]) -> list[str]:
        """See `CheckpointStorage.names`."""
        return sorted({name for name in self._below(path, self._system.ls, detail=False) if is_name(name)})

    def holding(self, path: Sequence[str], name: str) -> list[str]:
        """See `CheckpointStorage.holding`."""
        ending = f"/{checked(name)}"
        below = self._below(path, self._system.find)
        return sorted(it.removesuffix(ending) for it in below if it.endswith(ending) and is_name(it[: -len(ending)]))

    def remove(self, path: Sequence[str]) -> None:
        """See `CheckpointStorage.remove`. Packages may hide errors of bulk removals, so objects are removed singly."""
        where = self._path(path)
        with self._failing("removed", path):
            for it in {where, *self._system.find(where)}:
                with suppress(FileNotFoundError):
                    self._system.rm_file(it)

    def _path(self, path: Sequence[str]) -> str:
        return "/".join((self._root, *map(checked, path)))

    def _name(self, path: Sequence[str]) -> str:
        return "/".join((self.url, *path))

    def _below(self, path: Sequence[str], listing: Any, **options: Any) -> list[str]:
        """Lists the paths below a folder, relative to it. The list is empty if there is no such folder."""
        start = f"{self._path(path)}/"
        try:
            with self._failing("listed", path, unless_missing=True):
                found = listing(start.removesuffix("/"), **options)
        except FileNotFoundError:
            return []
        return [it.removeprefix(start).rstrip("/") for it in found if it.startswith(start)]

    @contextmanager
    def _failing(self, verb: str, path: Sequence[str], *, unless_missing: bool = False) -> Iterator[None]:
        """Converts errors to StorageFailed. The packages of stores have no common error class."""
        try:
            yield
        except errors.ShoalError:
            raise
        except Exception as error:
            code = _code(error)
            if unless_missing and isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
                raise
            reason = _PASSWORD.sub("//", " ".join(str(error).split()))
            raise errors.StorageFailed(
                f"{self._name(path)} could not be {verb}: {reason or type(error).__name__}{_advice(error, code)}",
                path="/".join(path),
            ) from None


class _Object:
    """An object that is open for reads by range."""

    at_a_time = 8  # reads mostly wait for the network

    def __init__(self, store: ObjectStore, path: Sequence[str], where: str, nbytes: int) -> None:
        self._store, self._path, self._where, self.nbytes = store, path, where, nbytes

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        wanted = sum(map(len, targets))
        if not wanted:
            return
        stop = min(start + wanted, self.nbytes)  # a store may refuse a range that starts beyond the end
        found = b""
        if start < stop:
            with self._store._failing("read", self._path):
                found = self._store._system.cat_file(self._where, start=start, end=stop)
        if len(found) != wanted:
            name = self._store._name(self._path)
            raise errors.CorruptCheckpoint(f"{name} is truncated at byte {start + len(found)}", file=name)
        rest = memoryview(found)
        for target in targets:
            target[:], rest = rest[: len(target)], rest[len(target) :]


class _Upload:
    """A file that appears when it is closed, which completes its upload."""

    def __init__(self, system: Any, target: str) -> None:
        self.file = system.open(target, "wb", block_size=PART_BYTES)

    def complete(self) -> None:
        self.file.close()

    def abort(self) -> None:
        try:
            self.file.discard()
        finally:
            self.file.closed = True  # else the garbage collector would upload the rest


class _Move:
    """A file with a temporary name that is renamed when it is complete."""

    def __init__(self, system: Any, target: str) -> None:
        folder, _, _ = target.rpartition("/")
        self._system, self._target, self._temporary = system, target, f"{folder}/{TEMPORARY}{secrets.token_hex(8)}"
        self.file = system.open(self._temporary, "wb")

    def complete(self) -> None:
        self.file.close()
        self._system.mv(self._temporary, self._target)

    def abort(self) -> None:
        self.file.close()
        self._system.rm_file(self._temporary)


def open_file_system(scheme: str, url: str) -> Any:
    """Returns the fsspec file system for a scheme, or raises BadRequest if there is none."""
    try:
        fsspec = importlib.import_module("fsspec")
        options = {**OPTIONS.get(scheme, {}), "skip_instance_cache": True, "use_listings_cache": False}
        system = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        raise errors.BadRequest(
            f"checkpoints at {url} need a package that is not installed ({error}); run pip install 'shoal[s3]' for "
            "S3, or install fsspec and the store's own package",
            url=url,
        ) from None
    except (OSError, TypeError, ValueError) as error:  # unknown scheme, or one that needs more than a URL, such as ftp
        raise errors.BadRequest(f"checkpoints cannot be stored at {url}: {error}", url=url) from None
    if scheme in ("s3", "s3a"):
        system.retries = _S3_ROUNDS
    return system


def _code(error: BaseException) -> str:
    """Returns the S3 code of an error, or an empty string if it is not an error from S3."""
    response = getattr(error.__cause__ or error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, Mapping) else ""


def _advice(error: Exception, code: str) -> str:
    kind = type(error).__name__
    if code == "NoSuchBucket":
        return "; create the bucket, or choose another"
    if "Credential" in kind or "Token" in kind:
        return "; give credentials by the environment or a profile, as for the store's own tools"
    if isinstance(error, PermissionError):
        return "; the credentials in the environment must allow Shoal to list, read, write and remove objects there"
    if isinstance(error, OSError | TimeoutError) or any(word in kind for word in ("Connect", "Timeout", "HTTP")):
        return "; check the network, and the endpoint and region in the environment"
    return ""


__all__ = ["PART_BYTES", "ObjectStore"]
