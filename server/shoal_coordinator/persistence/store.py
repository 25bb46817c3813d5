"""Where the coordinator's records are kept: one interface, and the store in memory. SQLite's is in a module of its own.

A store knows keys and bytes. What they mean is in `shoal_coordinator.messages.record_keys` and `snapshots`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from shoal import errors
from shoal_coordinator.persistence.sqlite_store import SqliteStore

# In place of a path: nothing is kept.
MEMORY = "memory"
_FILE_NAME = "coordinator.db"


class Store(Protocol):
    """A durable mapping from keys to records. One coordinator at a time has it open; one thread at a time uses it."""

    def load(self) -> dict[str, bytes]:
        """All records.

        Raises:
            StoreUnreadable: they are damaged.
        """
        ...

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        """Makes all of some changes or none of them. When this returns they survive the loss of the machine's power.

        Args:
            changes: new records by key; None takes one out, if it is there.

        Raises:
            StoreFailed, StoreUnreadable: they could not be made, or nobody knows whether they were; the store takes no
                further ones.
        """
        ...

    def say_where(self, address: str) -> None:
        """Has another coordinator that opens it, and is refused, learn where the one is reached that has it."""
        ...

    def close(self) -> None:
        """Lets others have it. May be repeated."""
        ...


class MemoryStore:
    """A store that ends with its process: for tests, and for clusters whose coordinator is not worth a file."""

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

    def say_where(self, address: str) -> None:
        """Says nothing: no other process finds it."""

    def close(self) -> None:
        """Keeps what it has, for whoever opens it again in this process."""


def open_store(where: str) -> Store:
    """The store at a path, or one in memory.

    Args:
        where: "memory", or a path, whose folder is there: one that is not may be a volume that was forgotten.

    Raises:
        StoreLocked: another process has it open.
        StoreUnreadable: it is damaged, of a newer version, or no store.
        StoreFailed: it cannot be opened or made.
    """
    if where == MEMORY:
        return MemoryStore()
    return SqliteStore(Path(where).expanduser().absolute())


def default_path(environment: Mapping[str, str] = os.environ) -> Path:
    """Where a user's programs keep state, by the XDG base directory specification."""
    # The specification has relative paths ignored.
    home = environment.get("XDG_STATE_HOME", "")
    state = Path(home) if os.path.isabs(home) else Path.home() / ".local" / "state"
    return state / "shoal" / _FILE_NAME


def make_default_path() -> Path:
    """The default path, in a folder that is made if it is not there: no volume is expected at it.

    Raises:
        StoreFailed: the folder cannot be made.
    """
    path = default_path()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise errors.StoreFailed(
            f"cannot make a folder for the store {path}: {error}. With --store or SHOAL_STORE, name a file in a folder "
            f"that user id {os.geteuid()} may write in",
            store=path,
        ) from None
    return path


__all__ = ["MEMORY", "MemoryStore", "Store", "default_path", "make_default_path", "open_store"]
