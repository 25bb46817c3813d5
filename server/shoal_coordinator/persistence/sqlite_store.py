"""The store in an SQLite file, and the lock that allows one coordinator at a time to use it."""

import fcntl
import json
import os
import socket
import sqlite3
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from shoal import errors
from shoal._system import private_files, volumes

# A change that an older coordinator would misread increments the schema. Both numbers are in the file's header; the
# second one is "SHOA". Schema 2 adds `order` to ledgers. Schema 3 has a record for each rank of a job, and schema 4 one
# for each leased or requeued range, and for the reports of a job's live workers.
SCHEMA = 4
_APPLICATION = 0x53484F41
_MOST_LOCK_BYTES = 4096
_HOLDER = ("pid", "host", "since", "address")
_TABLE = "CREATE TABLE records (key TEXT PRIMARY KEY NOT NULL, record BLOB NOT NULL, checksum INTEGER NOT NULL)"
_PUT = "INSERT OR REPLACE INTO records (key, record, checksum) VALUES (?, ?, ?)"
_REMOVE = "DELETE FROM records WHERE key = ?"


class SqliteStore:
    """A store in a file, with a write-ahead log and a lock beside it.

    A committed transaction is on the disk (`synchronous=FULL`). A transaction that was interrupted has no effect.

    Args:
        path: The file, which is created if it does not exist. Its folder must exist.

    Raises:
        StoreLocked: Another process has the store open; the message names it.
        StoreUnreadable: The file is damaged, has a newer schema, or is not a store.
        StoreFailed: The file cannot be opened or created.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: errors.ShoalError | None = None
        with self._as_shoal_errors("open"):
            os.close(os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC))
        self._lock = FileLock(path.with_name(f"{path.name}.lock"), f"the store {path}")
        try:
            with self._as_shoal_errors("open"):
                _create(path)
                # One thread at a time uses it, but not always the same one.
                self._database = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        except BaseException:
            self._lock.release()
            raise
        try:
            with self._as_shoal_errors("open"):
                self._prepare()
        except BaseException:
            self.close()
            raise

    def load(self) -> dict[str, bytes]:
        records = {}
        with self._as_shoal_errors("read"):
            for key, record, checksum in self._database.execute("SELECT key, record, checksum FROM records"):
                if _checksum(key, record) != checksum:
                    raise self._unreadable(f"the checksum of the record {key} does not match")
                records[key] = record
        return records

    def apply(self, changes: Mapping[str, bytes | None]) -> None:
        if self._failed:
            raise self._failed
        gone = [(key,) for key, record in changes.items() if record is None]
        put = [(key, record, _checksum(key, record)) for key, record in changes.items() if record is not None]
        try:
            with self._as_shoal_errors("write"):
                self._database.execute("BEGIN IMMEDIATE")
                self._database.executemany(_REMOVE, gone)
                self._database.executemany(_PUT, put)
                self._database.execute("COMMIT")
        except errors.ShoalError as error:
            # After a failed write the state of the disk is unknown (Rebello et al., "Can Applications Recover from
            # fsync Failures?", USENIX ATC 2020).
            self._failed = error
            raise

    def publish_address(self, address: str) -> None:
        with suppress(OSError):  # for error messages only; `apply` reports a full disk
            self._lock.publish_address(address)

    def close(self) -> None:
        with suppress(sqlite3.Error):  # committed transactions are on the disk in any case
            self._database.close()
        self._lock.release()

    def _prepare(self) -> None:
        execute = self._database.execute
        # SQLite holds its lock while the file is open, so that no other program can delay a write or make it fail.
        execute("PRAGMA locking_mode = EXCLUSIVE")
        (application,) = execute("PRAGMA application_id").fetchone()
        (schema,) = execute("PRAGMA user_version").fetchone()
        (objects,) = execute("SELECT count(*) FROM sqlite_master").fetchone()
        empty = not (application or schema or objects)
        if not empty and application != _APPLICATION:
            raise self._unreadable("it is the database of another program")
        if schema > SCHEMA:
            raise errors.StoreUnreadable(
                f"the store {self._path} was written by a newer version of Shoal (its schema is {schema}; this version "
                f"reads up to {SCHEMA}): start that version, or use another --store",
                store=self._path,
                schema=schema,
                known=SCHEMA,
            )
        (mode,) = execute("PRAGMA journal_mode = WAL").fetchone()
        if mode != "wal":
            raise self._failure("open", OSError(f"its file system does not support a write-ahead log, only {mode}"))
        execute("PRAGMA synchronous = FULL")
        if empty:
            execute("BEGIN IMMEDIATE")
            execute(_TABLE)
            execute(f"PRAGMA application_id = {_APPLICATION}")
            execute(f"PRAGMA user_version = {SCHEMA}")
            execute("COMMIT")
        (found, *_) = execute("PRAGMA quick_check(1)").fetchone()
        if found != "ok":
            raise self._unreadable(str(found))
        if schema < SCHEMA:  # from now on, older versions of Shoal must not read it
            execute(f"PRAGMA user_version = {SCHEMA}")

    @contextmanager
    def _as_shoal_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.OperationalError as error:
            code = getattr(error, "sqlite_errorcode", None)
            if code is None:  # raised by the Python module: a key is not text
                raise self._unreadable(str(error)) from None
            if code & 0xFF == sqlite3.SQLITE_BUSY:
                raise errors.StoreLocked(
                    f"another program, not a coordinator, has the store {self._path} open: close that program, or use "
                    "another --store",
                    store=self._path,
                ) from None
            raise self._failure(what, error) from None
        # The file is malformed, or not a database. SQLite's message may quote damaged text.
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            raise self._unreadable(str(error)) from None
        except OSError as error:
            raise self._failure(what, error) from None

    def _failure(self, what: str, error: Exception) -> errors.StoreFailed:
        advice = volumes.advice(error) if isinstance(error, OSError) else ""
        return errors.StoreFailed(
            f"cannot {what} the store {self._path}: {error}. "
            + (
                advice
                or f"Check whether its disk is full or failing, and whether user id {os.geteuid()} may write there"
            ),
            store=self._path,
        )

    def _unreadable(self, what: str) -> errors.StoreUnreadable:
        return errors.StoreUnreadable(
            f"the store {self._path} cannot be used: {what}. Restore a copy of it (with its -wal file, if it has "
            "one), or start with another --store: the jobs in this store are then lost, and servers free their "
            "shards",
            store=self._path,
        )


def _create(path: Path) -> None:
    """Creates the file if it does not exist. SQLite gives the files beside it, such as the -wal file, its mode."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.fchmod(descriptor, private_files.file_mode())
        finally:
            os.close(descriptor)


class FileLock:
    """A lock that one process holds until it ends, in a file that names the holder.

    Args:
        path: The lock file, which is never removed.
        what: What is locked, for messages.
        now: Returns the time, which the file records for operators.

    Raises:
        StoreLocked: Another process holds the lock.
        StoreFailed: The file cannot be created or written.
    """

    def __init__(self, path: Path, what: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> None:
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, private_files.file_mode())
        except OSError as error:
            raise _no_lock(what, path, error) from None
        try:
            # The lock belongs to the open file, not to a name, so the kernel releases it when the process ends.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            since = now().isoformat(timespec="seconds")
            self._holder: dict[str, object] = {"pid": os.getpid(), "host": socket.gethostname(), "since": since}
            self._write(self._holder)
        except BlockingIOError:
            holder = _read_holder(self._descriptor)
            os.close(self._descriptor)
            raise errors.StoreLocked(
                f"{what} is in use by the coordinator {_described(holder)}: stop that coordinator, or start this one "
                "with another --store",
                store=path,
                **holder,
            ) from None
        except OSError as error:
            os.close(self._descriptor)
            raise _no_lock(what, path, error) from None

    def publish_address(self, address: str) -> None:
        """Adds the holder's address to the file, for the message to refused processes."""
        self._write({**self._holder, "address": address})

    def release(self) -> None:
        """Releases the lock. Further calls have no effect."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _write(self, holder: Mapping[str, object]) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)


def _no_lock(what: str, path: Path, error: OSError) -> errors.StoreFailed:
    return errors.StoreFailed(f"cannot lock {what}: {error}. {volumes.advice(error)}".rstrip(), store=path)


def _checksum(key: str, record: bytes) -> int:
    return zlib.crc32(record, zlib.crc32(key.encode()))


def _read_holder(descriptor: int) -> dict[str, object]:
    """Returns what the holder of a lock has written, or nothing if it has not written yet."""
    try:
        holder = json.loads(os.pread(descriptor, _MOST_LOCK_BYTES, 0))
    except (OSError, ValueError):
        return {}
    return {key: holder[key] for key in _HOLDER if key in holder} if isinstance(holder, dict) else {}


def _described(holder: Mapping[str, object]) -> str:
    if not holder:
        return "that has just started"
    where = f" at {holder['address']}" if "address" in holder else ""
    return f"{where} with process id {holder.get('pid')} on {holder.get('host')}, since {holder.get('since')}".lstrip()


__all__ = ["SCHEMA", "FileLock", "SqliteStore"]
