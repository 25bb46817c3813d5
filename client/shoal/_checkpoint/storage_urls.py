"""Functions that open the checkpoint storage at a URL."""

from pathlib import Path

from shoal import errors
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.storage import CheckpointStorage


def open_storage(url: str, *, make: bool = True) -> CheckpointStorage:
    """Opens the checkpoint storage at a URL.

    Args:
        url: a local path, file://PATH, or a URL of an object store that fsspec supports, such as s3://BUCKET/PREFIX.
        make: creates a missing local folder at the first write.

    Raises:
        BadRequest: the kind of URL is unknown, or its package is not installed.
    """
    scheme, found, path = url.partition("://")
    if found and scheme not in ("file", "local"):
        from shoal._checkpoint.object_store import ObjectStore  # noqa: PLC0415 - only for URLs

        return ObjectStore(url)
    return LocalStorage(Path(path if found else url).absolute(), make=make)


def check_folder(url: str, how: str = "as --checkpoints of the coordinator does") -> None:
    """Checks that a local folder exists, because a missing one is a wrong name. Object stores are not checked.

    Args:
        url: the URL of an open storage; that of a local folder is its path.
        how: end of the message, which says how to name the right folder.

    Raises:
        StorageFailed: there is no such folder.
    """
    if "://" not in url and not Path(url).exists():
        raise errors.StorageFailed(f"there is no folder {url}; name the cluster's checkpoint storage {how}", folder=url)


def open_shared_storage(url: str) -> CheckpointStorage:
    """Opens the checkpoint storage that all processes of a cluster share.

    A missing folder is not created, because it may be a volume that is not mounted.

    Raises:
        BadRequest: as for `open_storage`, or the URL is the memory of one process.
    """
    if url.startswith("memory://"):
        raise errors.BadRequest(
            f"checkpoints at {url} would be in the memory of one process; choose a folder that the coordinator and all "
            "servers share, or an object store",
            url=url,
        )
    return open_storage(url, make=False)


__all__ = ["check_folder", "open_shared_storage", "open_storage"]
