"""Where checkpoints live, by the URL that a user or an operator names: which storage each kind of URL is."""

from pathlib import Path

from shoal import errors
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.storage import CheckpointStorage


def open_storage(url: str, *, make: bool = True) -> CheckpointStorage:
    """The folder that a user names.

    Args:
        url: a path of this machine, or file://PATH; or of an object store, as fsspec has them: s3://BUCKET/PREFIX.
        make: makes a folder of this machine that is not there, when something is written.

    Raises:
        BadRequest: another kind of URL, or the package for it is not installed.
    """
    scheme, found, path = url.partition("://")
    if found and scheme not in ("file", "local"):
        from shoal._checkpoint.object_store import ObjectStore  # noqa: PLC0415 - only where it is asked for

        return ObjectStore(url)
    return LocalStorage(Path(path if found else url).absolute(), make=make)


def open_shared_storage(url: str) -> CheckpointStorage:
    """The folder that an operator names for all processes of a cluster; never made, as it may be a volume.

    Raises:
        BadRequest: as for `open_storage`; or it is the memory of one process, where no other finds anything.
    """
    if url.startswith("memory://"):
        raise errors.BadRequest(
            f"checkpoints at {url} would be in the memory of one process, where no other finds them: name a folder "
            "that the coordinator and all servers see, or an object store",
            url=url,
        )
    return open_storage(url, make=False)


__all__ = ["open_shared_storage", "open_storage"]
