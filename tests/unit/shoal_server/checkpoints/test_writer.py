"""Checkpoint writer of a server: order of writes, abandoned checkpoints, and late files of earlier jobs."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from shoal import errors
from shoal._checkpoint.catalogue import Catalogue
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import FileEntry, Manifest
from shoal._wire.layout import ArenaLayout, ShardLayout, Slice
from shoal.variables import Variable
from shoal_server.checkpoints.writer import CheckpointWriter
from shoal_server.shards.values.snapshot import ShardSnapshot, Snapshot
from support.waiting import wait_until

VARIABLES = {"w": Variable((4,))}
F32 = np.dtype(np.float32)


class BlockingStorage(LocalStorage):
    """A folder whose writes into a job's part of it wait until the test lets them go on."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.held: dict[str, threading.Event] = {}
        self.begun: dict[str, threading.Event] = {}

    def hold(self, *jobs: str) -> None:
        for job in jobs:
            self.held[job], self.begun[job] = threading.Event(), threading.Event()

    def write(self, path: Sequence[str], pieces: Iterable[bytes | bytearray | memoryview]) -> None:
        if path[0] in self.held:
            self.begun[path[0]].set()
            assert self.held[path[0]].wait(30)
        super().write(path, pieces)


@pytest.fixture
def folder(tmp_path: Path) -> BlockingStorage:
    return BlockingStorage(tmp_path)


@pytest.fixture
def writer(folder: BlockingStorage) -> Iterator[CheckpointWriter]:
    writer = CheckpointWriter(folder)
    yield writer
    for held in folder.held.values():
        held.set()
    writer.close()


def snapshot(shard: int = 0, value: float = 0.0) -> ShardSnapshot:
    arena = ArenaLayout(F32, VARIABLES["w"].aggregation, (Slice("w", 0, 4, 0),), 4, F32)
    values = Snapshot(1, np.full(4, value, F32), {}, threading.Lock())
    return ShardSnapshot(ShardLayout(shard, (arena,)), [(values, 0)])


def begin(
    writer: CheckpointWriter, job: str, number: int, cut: int, *snapshots: ShardSnapshot
) -> tuple[ShardSnapshot, ...]:
    writer.begin(job, number, cut, VARIABLES, snapshots)
    return snapshots


def check_collected(writer: CheckpointWriter, job: str, number: int) -> list[FileEntry]:
    files = writer.collect(job, number, within_s=30)
    assert files is not None
    return files


def test_late_files_of_an_earlier_cut_are_not_in_the_checkpoint(folder: BlockingStorage, tmp_path: Path) -> None:
    """A job is cancelled while its servers save, nothing of it to be seen yet; then one of its name is submitted."""
    late, other = CheckpointWriter(folder), CheckpointWriter(LocalStorage(tmp_path))
    folder.hold("j")
    begin(late, "j", 1, 17, snapshot(0, 1.0))
    assert folder.begun["j"].wait(30)
    begin(other, "j", 1, 23, snapshot(0, 2.0))
    manifest = Manifest("j", 1, 0.0, 1, 1, {}, (), tuple(check_collected(other, "j", 1)))
    folder.held["j"].set()
    late.close()
    other.close()
    catalogue = Catalogue(folder)
    catalogue.publish(manifest)
    catalogue.verify(manifest)
    assert len(folder.names(("j", "00000001"))) == 3, "two files and the manifest"
    catalogue.remove("j", 1)
    assert folder.names(("j",)) == []


def test_writer_keeps_the_files_of_100_jobs(folder: BlockingStorage, writer: CheckpointWriter) -> None:
    jobs = [f"job-{number}" for number in range(100)]
    folder.hold(*jobs)
    for number, job in enumerate(jobs):
        begin(writer, job, 1, number + 1, snapshot())
    assert writer.collect("job-0", 1, within_s=0) is None
    for job in jobs:
        folder.held[job].set()
    for number, job in enumerate(jobs):
        assert [file.name for file in check_collected(writer, job, 1)] == [f"shard-00000-{number + 1}.safetensors"]


def test_a_write_that_hangs_does_not_hold_up_another_job(folder: BlockingStorage, writer: CheckpointWriter) -> None:
    folder.hold("hangs")
    begin(writer, "hangs", 1, 1, snapshot())
    assert folder.begun["hangs"].wait(30)
    begin(writer, "other", 1, 2, snapshot())
    assert check_collected(writer, "other", 1)


def test_dropping_a_job_frees_what_is_not_written(folder: BlockingStorage, writer: CheckpointWriter) -> None:
    folder.hold("a")
    first = begin(writer, "a", 1, 1, snapshot(0), snapshot(1))
    assert folder.begun["a"].wait(30)
    second = begin(writer, "a", 2, 2, snapshot(0))
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(writer.collect, "a", 2, within_s=30)
        writer.drop("a")
        with pytest.raises((errors.Cancelled, errors.UnknownCheckpoint), match="abandoned"):
            waits.result()
    assert not second[0].in_use
    with pytest.raises(errors.UnknownCheckpoint):
        writer.collect("a", 2, within_s=0)
    folder.held["a"].set()
    wait_until(lambda: not any(it.in_use for it in first), what="the end of the file that was being written")
    assert [*folder.names(("a", "00000001"))] == ["shard-00000-1.safetensors"], "the second was still begun"


def test_queued_checkpoint_is_replaced_by_the_next_one_of_its_job(
    folder: BlockingStorage, writer: CheckpointWriter
) -> None:
    folder.hold("a")
    [running] = begin(writer, "a", 1, 1, snapshot())
    assert folder.begun["a"].wait(30)
    [queued] = begin(writer, "a", 2, 2, snapshot())
    begin(writer, "a", 3, 3, snapshot())
    assert (running.in_use, queued.in_use) == (True, False)
    assert writer.collect("a", 3, within_s=0) is None
    folder.held["a"].set()
    assert check_collected(writer, "a", 3)
    assert folder.names(("a",)) == ["00000001", "00000003"]


def test_clear_abandons_the_checkpoints_of_all_jobs(folder: BlockingStorage, writer: CheckpointWriter) -> None:
    folder.hold("a", "b")
    kept = [begin(writer, job, 1, 1, snapshot(0), snapshot(1)) for job in ("a", "b")]
    writer.clear()
    for job in ("a", "b"):
        folder.held[job].set()
        with pytest.raises(errors.UnknownCheckpoint):
            writer.collect(job, 1, within_s=0)
    wait_until(lambda: not any(it.in_use for pair in kept for it in pair), what="the end of all snapshots")


def test_failed_write_is_reported_and_keeps_no_snapshot(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr("shoal_server.checkpoints.writer.write_tensors", broken)
    [kept] = begin(writer, "a", 1, 1, snapshot())
    with pytest.raises(RuntimeError, match="boom"):
        writer.collect("a", 1, within_s=30)
    assert not kept.in_use
    monkeypatch.undo()
    begin(writer, "a", 2, 2, snapshot())
    assert check_collected(writer, "a", 2)
