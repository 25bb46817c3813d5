"""Metadata stores: all keep their records, and the file store keeps them through crashes and disk errors."""

import contextlib
import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from shoal import errors
from shoal_coordinator.persistence.sqlite_store import SCHEMA, FileLock, SqliteStore
from shoal_coordinator.persistence.store import MemoryStore, Store, default_path, make_default_path, open_store
from support.faults import store_writer
from support.faults.store_writer import expected, transaction
from support.run_lengths import draws


class Kept:
    """A store that is closed and opened again: one of a kind, in a folder."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.path = kind, folder / "coordinator.db"
        self.store: Store = self._open()

    def reopen(self) -> Store:
        self.store.close()
        if self.kind != "memory":  # which ends with its process
            self.store = self._open()
        return self.store

    def _open(self) -> Store:
        return MemoryStore() if self.kind == "memory" else SqliteStore(self.path)


@pytest.fixture(params=["memory", "sqlite"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(request.param, tmp_path)
    yield kept
    kept.store.close()


class TestEveryStore:
    """What any store has to do, whatever it is made of."""

    def test_begins_empty(self, kept: Kept) -> None:
        assert kept.store.load() == {}
        assert kept.reopen().load() == {}

    def test_load_returns_applied_changes(self, kept: Kept) -> None:
        kept.store.apply({"a": b"1", "b/ü/☃": b"\x00\xff" * 3, "empty": b""})
        kept.store.apply({"a": b"2", "empty": None, "never/there": None})
        wanted = {"a": b"2", "b/ü/☃": b"\x00\xff" * 3}
        assert kept.store.load() == wanted
        assert kept.reopen().load() == wanted

    def test_takes_nothing_too(self, kept: Kept) -> None:
        kept.store.apply({})
        assert kept.reopen().load() == {}

    def test_takes_large_records_and_many(self, kept: Kept) -> None:
        changes = {"large": b"\xa5" * (4 << 20), **{f"many/{number}": b"x" for number in range(5_000)}}
        kept.store.apply(changes)
        assert kept.reopen().load() == changes

    def test_gives_copies(self, kept: Kept) -> None:
        kept.store.apply({"a": b"1"})
        kept.store.load().clear()
        assert kept.store.load() == {"a": b"1"}

    def test_closes_twice(self, kept: Kept) -> None:
        kept.store.apply({"a": b"1"})
        kept.store.close()
        kept.store.close()
        assert kept.reopen().load() == {"a": b"1"}

    @settings(max_examples=draws(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(
        batches=st.lists(
            st.dictionaries(st.sampled_from("abcdefgh"), st.none() | st.binary(max_size=40), max_size=5), max_size=12
        ),
        data=st.data(),
    )
    def test_is_a_mapping(self, kept: Kept, batches: Sequence[Mapping[str, bytes | None]], data: st.DataObject) -> None:
        kept.store.apply(dict.fromkeys(kept.store.load()))
        model: dict[str, bytes] = {}
        for changes in batches:
            kept.store.apply(changes)
            model = {key: record for key, record in {**model, **changes}.items() if record is not None}
            if data.draw(st.booleans()):
                kept.reopen()
            assert kept.store.load() == model


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "coordinator.db"


def test_a_store_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_store("memory"), MemoryStore)
    monkeypatch.setenv("HOME", str(tmp_path))
    with contextlib.closing(open_store("~/state.db")):
        assert (tmp_path / "state.db").exists()


def test_the_default_is_where_programs_keep_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_path({}) == tmp_path / ".local/state/shoal/coordinator.db"
    assert default_path({"XDG_STATE_HOME": "relative"}) == tmp_path / ".local/state/shoal/coordinator.db"
    assert default_path({"XDG_STATE_HOME": "/var/state"}) == Path("/var/state/shoal/coordinator.db")


def test_the_default_has_its_folders_made_and_no_other_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is not there may be a volume that was forgotten: what is kept beside it would be lost."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert make_default_path().parent.is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("HOME", str(tmp_path / "file"))
    with pytest.raises(errors.StoreFailed, match=rf"Set --store .* user id {os.geteuid()} may write"):
        make_default_path()
    missing = tmp_path / "volume" / "coordinator.db"
    with pytest.raises(errors.StoreFailed, match=f"{missing}.*there is no such folder: create it, or mount its volume"):
        open_store(str(missing))
    assert not missing.parent.exists()


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, rf"user id {os.geteuid()}, group id {os.getegid()}: .*chown; in Kubernetes, fsGroup"),
        (errno.EROFS, "read-only: mount a volume there"),
    ],
)
def test_a_folder_that_may_not_be_written(
    path: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    """The test fakes the system's error, because root may write everywhere."""
    real = os.open

    def refused(path: Path, flags: int, *rest: int, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(number, os.strerror(number))
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(errors.StoreFailed, match=f"{path}.*{advice}"):
        SqliteStore(path)


# Whose it is.


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o660, False), (0o644, True), (0o602, True)])
def test_a_store_that_all_users_can_access_is_warned_of(path: Path, mode: int, warned: bool) -> None:
    """It has the key that signs tokens. A backup may have been restored with other permissions."""
    open_store(str(path)).close()
    path.chmod(mode)
    with capture_logs() as logs:
        open_store(str(path)).close()
    assert [log["fix"] for log in logs] == [f"chmod o= {path}*"] * warned


def test_an_open_store_is_refused_and_its_process_named(path: Path) -> None:
    with contextlib.closing(SqliteStore(path)) as store:
        store.apply({"a": b"1"})
        with pytest.raises(errors.StoreLocked, match=r"process id \d+ on .+, since \d{4}-") as refused:
            SqliteStore(path)
        assert refused.value.details["pid"].isdigit()
        assert "another --store" in refused.value.message
        store.publish_address("coordinator-0.example:7070")
        with pytest.raises(
            errors.StoreLocked, match=r"at coordinator-0\.example:7070 with process id \d+ on"
        ) as refused:
            SqliteStore(path)
        assert refused.value.details["address"] == "coordinator-0.example:7070"
        store.apply({"b": b"2"})
    with contextlib.closing(SqliteStore(path)) as store:
        assert store.load() == {"a": b"1", "b": b"2"}


def test_a_lock_whose_holder_has_not_written_yet(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", "it")
    for content in ("", "[", "[]", '{"other": 1}'):
        (tmp_path / "lock").write_text(content)
        with pytest.raises(errors.StoreLocked, match="it is in use"):
            FileLock(tmp_path / "lock", "it")
    lock.release()
    lock.release()
    FileLock(tmp_path / "lock", "it").release()


def test_a_store_that_another_program_has_open(path: Path) -> None:
    SqliteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(errors.StoreLocked, match="not a coordinator"):
            SqliteStore(path)
    SqliteStore(path).close()


def test_the_lock_goes_with_its_process(path: Path) -> None:
    with writer(path) as process:
        assert output_of(process).readline() == "open\n"
        with pytest.raises(errors.StoreLocked, match=f"process id {process.pid} on"):
            SqliteStore(path)
        process.kill()
        process.wait()
        SqliteStore(path).close()


# What it is.


def test_a_store_of_a_newer_version_is_left_alone(path: Path) -> None:
    SqliteStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA + 1}")
    before = path.read_bytes()
    with pytest.raises(errors.StoreUnreadable, match=f"schema is {SCHEMA + 1}; this version reads up to {SCHEMA}"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_store_of_an_older_version_is_read_and_then_refused_by_that_version(path: Path) -> None:
    with contextlib.closing(SqliteStore(path)) as store:
        store.apply({"member/a": b"alive"})
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA user_version = {SCHEMA - 1}")
    with contextlib.closing(SqliteStore(path)) as store:
        assert store.load() == {"member/a": b"alive"}
    with contextlib.closing(sqlite3.connect(path)) as database:
        assert database.execute("PRAGMA user_version").fetchone() == (SCHEMA,)


@pytest.mark.parametrize("pragma", ["application_id = 7", ""])
def test_a_database_of_another_program_is_left_alone(path: Path, pragma: str) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE theirs (a)")
        database.execute(f"PRAGMA {pragma}" if pragma else "SELECT 1")
    before = path.read_bytes()
    with pytest.raises(errors.StoreUnreadable, match="another program"):
        SqliteStore(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database(path: Path) -> None:
    path.write_text("# Notes\n" * 1_000)
    with pytest.raises(errors.StoreUnreadable, match="not a database"):
        SqliteStore(path)


def test_a_place_where_no_file_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.StoreFailed, match="cannot open the store"):
        SqliteStore(tmp_path / "file" / "coordinator.db")
    (tmp_path / "folder").mkdir()
    with pytest.raises(errors.StoreFailed, match="cannot open the store"):
        SqliteStore(tmp_path / "folder")


def filled(path: Path, transactions: int = 30) -> bytes:
    """A store's file after some transactions, all of it in one place."""
    with contextlib.closing(SqliteStore(path)) as store:
        for number in range(1, transactions + 1):
            store.apply(transaction(number))
    return path.read_bytes()


@settings(max_examples=draws(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damage_is_found_or_does_no_harm(tmp_path: Path, data: st.DataObject) -> None:
    """Whichever byte has changed, the store either reports damage or returns what was written."""
    path = tmp_path / "damaged.db"
    if not (tmp_path / "whole.db").exists():  # of the first example
        filled(tmp_path / "whole.db")
    whole = (tmp_path / "whole.db").read_bytes()
    place = data.draw(st.integers(0, len(whole) - 1))
    flipped = whole[place] ^ data.draw(st.integers(1, 255))
    path.write_bytes(whole[:place] + bytes([flipped]) + whole[place + 1 :])
    for suffix in ("-wal", "-journal"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    try:
        with contextlib.closing(SqliteStore(path)) as store:
            assert store.load() == expected(30)
    except (errors.StoreUnreadable, errors.StoreLocked, errors.StoreFailed) as error:
        said = error.message
        assert str(path) in said


def test_damage_that_sqlite_cannot_name_in_text(path: Path) -> None:
    path.write_bytes(filled(path).replace(b"tablerecords", b"table\xf2ecords"))
    with pytest.raises(errors.StoreUnreadable, match="copy of it"):
        SqliteStore(path)


def test_a_key_that_is_no_text_any_more(path: Path) -> None:
    path.write_bytes(filled(path).replace(b"passing/", b"\xf0assing/"))
    with pytest.raises(errors.StoreUnreadable, match="copy of it"), contextlib.closing(SqliteStore(path)) as store:
        store.load()


def test_a_file_that_was_cut_short(path: Path) -> None:
    whole = filled(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(errors.StoreUnreadable, match="copy of it"), contextlib.closing(SqliteStore(path)) as store:
        store.load()


# A disk that is full.


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[sqlite3.Connection]:
    """The connections to databases that are opened during the test."""
    opened: list[sqlite3.Connection] = []
    connect = sqlite3.connect

    def spy(*arguments: Any, **options: Any) -> sqlite3.Connection:
        opened.append(connect(*arguments, **options))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", spy)
    return opened


def test_a_full_disk_is_an_error_and_stored_records_stay(path: Path, connections: list[sqlite3.Connection]) -> None:
    with contextlib.closing(SqliteStore(path)) as store:
        store.apply(transaction(1))
        [database] = connections
        (pages,) = database.execute("PRAGMA page_count").fetchone()
        database.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(errors.StoreFailed, match=r"cannot write the store .*coordinator\.db.* full") as failed:
            store.apply({"large": b"x" * (1 << 20), "key/1": b"torn"})
        database.execute("PRAGMA max_page_count = 1000000")
        with pytest.raises(errors.StoreFailed) as again:
            store.apply({"small": b""})
        assert again.value is failed.value, "nothing is written behind what may be missing"
    with contextlib.closing(SqliteStore(path)) as store:
        assert store.load() == expected(1)


# Processes and machines that die.


def output_of(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout
    return process.stdout


@contextlib.contextmanager
def writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, store_writer.__file__, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_that_is_killed_leaves_its_last_transaction_whole(path: Path) -> None:
    """Killed at some moment of some transaction, again and again on the same file."""
    for lines in (0, 1, 2, 7, 40):
        path.unlink(missing_ok=True)
        path.with_name(f"{path.name}-wal").unlink(missing_ok=True)
        with writer(path) as process:
            assert output_of(process).readline() == "open\n"
            said = [int(output_of(process).readline()) for _ in range(lines)]
            process.kill()
            said += [int(line) for line in output_of(process).read().splitlines()]
        last = max(said, default=0)
        with contextlib.closing(SqliteStore(path)) as store:
            assert store.load() in (expected(last), expected(last + 1)), (
                "what it said is there, and the next whole or not"
            )


def test_a_copy_that_is_taken_while_its_process_is_stopped_opens_and_has_all_that_it_said(
    path: Path, tmp_path: Path
) -> None:
    """As in docs/how-to/backup.md, the process is stopped at any moment of a transaction, copied, and continued."""
    with writer(path) as process:
        assert output_of(process).readline() == "open\n"
        for copy in range(5):
            said = [int(output_of(process).readline()) for _ in range(20)][-1]
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            for suffix in ("", "-wal"):
                shutil.copy(f"{path}{suffix}", tmp_path / f"copy-{copy}.db{suffix}")
            process.send_signal(signal.SIGCONT)
            with contextlib.closing(SqliteStore(tmp_path / f"copy-{copy}.db")) as store:
                found = store.load()
            number = _number(found)
            assert number >= said
            assert found == expected(number)


def _number(records: Mapping[str, bytes]) -> int:
    """Of the last transaction that a store has: each record is its number, 200 times."""
    record = records[store_writer.KEYS[0]].decode()
    return int(record[: len(record) // 200])


def test_other_programs_cannot_read_a_store_that_is_in_use(path: Path) -> None:
    """So SQLite's own ways to a copy, `.backup` and VACUUM INTO, are not for one."""
    with contextlib.closing(SqliteStore(path)) as store, contextlib.closing(sqlite3.connect(path, timeout=0)) as other:
        store.apply(transaction(1))
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("SELECT * FROM records").fetchall()


@settings(max_examples=draws(80), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_log_that_is_torn_anywhere_leaves_a_whole_transaction(tmp_path: Path, data: st.DataObject) -> None:
    """The file system has lost the end of the log, or has some of it as it never was: power failed before a sync."""
    source = tmp_path / "source.db"
    if not source.exists():
        with contextlib.closing(SqliteStore(source)) as store:
            for number in range(1, 13):
                store.apply(transaction(number))
            for suffix in ("", "-wal"):  # with the log that a clean end would have done away with
                shutil.copy(f"{source}{suffix}", f"{tmp_path}/torn.db{suffix}")
    log = Path(f"{tmp_path}/torn.db-wal").read_bytes()
    torn = tmp_path / "again.db"
    shutil.copy(tmp_path / "torn.db", torn)
    place = data.draw(st.integers(0, len(log)))
    rest = data.draw(st.sampled_from([b"", b"\0" * (len(log) - place), log[place:][::-1]]))
    Path(f"{torn}-wal").write_bytes(log[:place] + rest)
    with contextlib.closing(SqliteStore(torn)) as store:
        assert store.load() in [expected(number) for number in range(13)]
        store.apply(transaction(13))
        assert store.load() == expected(13)
