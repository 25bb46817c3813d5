"""The interface of metadata stores, and the store in memory. `sqlite_store` has the store in a file.

A store maps keys to bytes. `shoal_coordinator.messages.record_keys` and `snapshots` define what these mean.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import structlog

from shoal import errors
from shoal._system import private_files
from shoal_coordinator.persistence.sqlite_store import SqliteStore

_log = structlog.get_logger(__name__)

# The value in place of a path for a store in memory.
MEMORY = "memory"
_FILE_NAME = "coordinator.db"


class Store(Protocol):
    """A durable mapping from keys to records, for one coordinator at a time and one thread at a time."""

    def load(self) -> dict[str, bytes]:
        """Returns all records.

        Raises:
            StoreUnreadable: A record is damaged.
        """
        ...

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        """Applies changes atomically. After it returns, they survive a power failure.

        Args:
            changes: New records by key. None removes a record, if it exists.

        Raises:
            StoreFailed, StoreUnreadable: The changes were not applied, or their state is unknown. The store refuses
                all further changes.
        """
        ...

    def publish_address(self, address: str) -> None:
        """Records the coordinator's address for the error message of another coordinator that opens the store."""
        ...

    def close(self) -> None:
        """Closes the store, so that others can open it. Further calls have no effect."""
        ...


class MemoryStore:
    """A store that ends with its process, for tests and for clusters whose state need not survive the coordinator."""

    def __init__(self) -> None:
        self._records: dict[str, bytes] = {}

    def load(self) -> dict[str, bytes]:
        return dict(self._records)

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        for key, record in changes.items():
            if record is None:
                self._records.pop(key, None)
            else:
                self._records[key] = record

    def publish_address(self, address: str) -> None:
        """Does nothing, because no other process can open this store."""

    def close(self) -> None:
        """Does nothing: the records stay while the object exists."""


def open_store(where: str) -> Store:
    """Opens the store at a path, or one in memory.

    Args:
        where: "memory", or a path in an existing folder. A missing folder may be a volume that is not mounted.

    Raises:
        StoreLocked: Another process has the store open.
        StoreUnreadable: The file is damaged, has a newer schema, or is not a store.
        StoreFailed: The file cannot be opened or created.
    """
    if where == MEMORY:
        return MemoryStore()
    path = Path(where).expanduser().absolute()
    store = SqliteStore(path)
    # Not refused: a coordinator must start again although, for example, a backup was restored with other permissions.
    if path.stat().st_mode & stat.S_IRWXO:
        _log.warning(
            "all users of this machine can access the store, which has the key that signs tokens",
            store=str(path),
            fix=f"chmod o= {path}*",
        )
    return store


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the default path of the store."""
    return private_files.state_folder(environment) / _FILE_NAME


def make_default_path() -> Path:
    """Returns the default path, and creates its folder if it does not exist.

    Raises:
        StoreFailed: The folder cannot be created.
    """
    path = default_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise errors.StoreFailed(
            f"cannot create a folder for the store {path}: {error}. Set --store or SHOAL_STORE to a file in a folder "
            f"that user id {os.geteuid()} may write to",
            store=path,
        ) from None
    return path


__all__ = ["MEMORY", "MemoryStore", "Store", "default_path", "make_default_path", "open_store"]
