"""Checkpoints in an object store, by any URL that fsspec knows. What S3 is told is here; who reads and writes is not.

An object appears when its upload is completed, so that it is there whole or not at all. Credentials, endpoints and
regions come from the environment, as each store's own package looks for them: never from a URL, never into a message.
"""

import importlib
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from shoal import errors
from shoal._checkpoint.storage import TEMPORARY, Buffer, StorageFile, checked, is_name, missing

# What is held in memory of a file that is being written, and the parts that it is uploaded in: S3 takes 10,000.
PART_BYTES = 16 << 20

_PASSWORD = re.compile(r"//[^/\s]*@")  # in an endpoint's URL, which may be quoted
# Seconds without an answer, and how often botocore asks, with pauses of a few seconds in all.
_S3: Mapping[str, Any] = {
    "config_kwargs": {
        "connect_timeout": 5,
        "read_timeout": 30,
        "retries": {"total_max_attempts": 3, "mode": "standard"},
    },
    "fixed_upload_size": True,  # some stores that speak S3 want parts of one size
}
# How often s3fs does all that again: an answer that breaks off is not for botocore to repeat.
_S3_ROUNDS = 2
# Where a file appears when it is closed, and can be given up before; elsewhere it gets its name at the end.
_UPLOADS = ("s3", "s3a", "gs", "gcs")
_OPTIONS: Mapping[str, Mapping[str, Any]] = {"s3": _S3, "s3a": _S3}


class ObjectStore:
    """A folder of an object store: a bucket, or what has a common prefix there.

    Args:
        url: SCHEME://BUCKET or SCHEME://BUCKET/PREFIX. memory://PREFIX is the memory of this process, for tests.

    Raises:
        BadRequest: it is no such URL, it has credentials in it, or the store's package is not installed.
    """

    def __init__(self, url: str) -> None:
        self._scheme, _, rest = url.partition("://")
        if "@" in rest:
            raise errors.BadRequest(
                f"a URL of checkpoints ({self._scheme}://...) has an '@' in it: credentials and accounts belong in the "
                "environment, where the store's own tools look for them"
            )
        names = [checked(name) for name in rest.removesuffix("/").split("/")]
        self.url = f"{self._scheme}://{'/'.join(names)}"
        self._system = _system(self._scheme, self.url)
        self._root: str = self._system._strip_protocol(self.url)

    def write(self, path: Sequence[str], pieces: Iterable[Buffer]) -> None:
        """See `CheckpointStorage.write`. Until the end there are parts of an upload; it is given up on the way out of an error."""
        with self._failing("written", path):
            upload = (_Upload if self._scheme in _UPLOADS else _Move)(self._system, self._path(path))
        try:
            for piece in pieces:  # whose errors are not the store's
                with self._failing("written", path):
                    upload.file.write(piece)
            with self._failing("written", path):
                upload.complete()
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
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
            raise errors.StorageFailed(f"{self._name(path)} could not be read: it is no file", path="/".join(path))
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
        """See `CheckpointStorage.remove`. One by one: what a store says of many at once, its package may not pass on."""
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
        """What a listing of a folder has, by its path from there; nothing if there is no such folder."""
        start = f"{self._path(path)}/"
        try:
            with self._failing("listed", path, unless_missing=True):
                found = listing(start.removesuffix("/"), **options)
        except FileNotFoundError:
            return []
        return [it.removeprefix(start).rstrip("/") for it in found if it.startswith(start)]

    @contextmanager
    def _failing(self, verb: str, path: Sequence[str], *, unless_missing: bool = False) -> Iterator[None]:
        """Every store's package has errors of its own, and not all have a class in common."""
        try:
            yield
        except errors.ShoalError:
            raise
        except Exception as error:
            code = _code(error)
            if unless_missing and isinstance(error, FileNotFoundError) and code != "NoSuchBucket":
                raise
            said = _PASSWORD.sub("//", " ".join(str(error).split()))
            raise errors.StorageFailed(
                f"{self._name(path)} could not be {verb}: {said or type(error).__name__}{_advice(error, code)}",
                path="/".join(path),
            ) from None


class _Object:
    """An object that is read by ranges."""

    at_a_time = 8  # each waits for its answer most of the time

    def __init__(self, store: ObjectStore, path: Sequence[str], where: str, nbytes: int) -> None:
        self._store, self._path, self._where, self.nbytes = store, path, where, nbytes

    def read_into(self, start: int, targets: Sequence[memoryview]) -> None:
        wanted = sum(map(len, targets))
        if not wanted:
            return
        stop = min(start + wanted, self.nbytes)  # a store may refuse a range that begins behind the end
        found = b""
        if start < stop:
            with self._store._failing("read", self._path):
                found = self._store._system.cat_file(self._where, start=start, end=stop)
        if len(found) != wanted:
            name = self._store._name(self._path)
            raise errors.CorruptCheckpoint(f"{name} is cut short: it ends at byte {start + len(found)}", file=name)
        rest = memoryview(found)
        for target in targets:
            target[:], rest = rest[: len(target)], rest[len(target) :]


class _Upload:
    """A file that nobody sees before it is closed, which completes its upload."""

    def __init__(self, system: Any, target: str) -> None:
        self.file = system.open(target, "wb", block_size=PART_BYTES)

    def complete(self) -> None:
        self.file.close()

    def abort(self) -> None:
        try:
            self.file.discard()
        finally:
            self.file.closed = True  # or the rest would be uploaded when it is collected


class _Move:
    """A file of another name, which no reader looks for, until it is complete."""

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


def _system(scheme: str, url: str) -> Any:
    """The file system of fsspec for a scheme; BadRequest if there is none here."""
    try:
        fsspec = importlib.import_module("fsspec")
        options = {**_OPTIONS.get(scheme, {}), "skip_instance_cache": True, "use_listings_cache": False}
        system = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        raise errors.BadRequest(
            f"checkpoints at {url} need a package that is not installed here ({error}): pip install 'shoal[s3]' for "
            "S3, or fsspec and the store's own package",
            url=url,
        ) from None
    except ValueError as error:  # it knows no such scheme
        raise errors.BadRequest(f"checkpoints cannot live at {url}: {error}", url=url) from None
    if scheme in ("s3", "s3a"):
        system.retries = _S3_ROUNDS
    return system


def _code(error: BaseException) -> str:
    """What S3 calls an error; empty: it was not S3 that answered."""
    response = getattr(error.__cause__ or error, "response", None)
    return str(response.get("Error", {}).get("Code", "")) if isinstance(response, Mapping) else ""


def _advice(error: Exception, code: str) -> str:
    kind = type(error).__name__
    if code == "NoSuchBucket":
        return "; make the bucket, or name another"
    if "Credential" in kind or "Token" in kind:
        return "; give credentials by the environment or a profile, as the store's own tools take them"
    if isinstance(error, PermissionError):
        return "; the credentials that the environment gives have to let Shoal list, read, write and remove there"
    if isinstance(error, OSError | TimeoutError) or any(word in kind for word in ("Connect", "Timeout", "HTTP")):
        return "; look at the way to the store, and at the endpoint and region that the environment names"
    return ""


__all__ = ["PART_BYTES", "ObjectStore"]
