"""Checkpoints of real servers without a coordinator: consistent cuts, restores on any number of servers, and damage."""

import errno
import os
import resource
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shoal import _rpc, consistency, errors, optim
from shoal._checkpoint import manifest as manifest_module
from shoal._checkpoint import tensor_files
from shoal._checkpoint.catalogue import Catalogue
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import Manifest
from shoal._checkpoint.storage_urls import open_storage
from shoal._checkpoint.tensor_files import TensorReader
from shoal._training import ParameterClient
from shoal.partitioners import FixedShards
from shoal.v1 import parameter_server_pb2 as pb
from shoal.v1 import state_pb2
from shoal.variables import Variable
from shoal_coordinator.effects import checkpoint_cut
from shoal_coordinator.effects.server_calls import ServerCalls
from shoal_coordinator.effects.server_channels import ServerChannels
from shoal_coordinator.messages import HoldResult, JobRef, ServerRef, TakeCut
from shoal_server.checkpoints import cut_session, writer
from shoal_server.shards.values.shard import Arena
from support import run_lengths
from support.clusters.shard_servers import ShardServers
from support.waiting import wait_until

JOB = {
    "kernel": Variable((40, 30), partitioner=FixedShards(3)),
    "bias": Variable((30,)),
    "number": Variable(()),
    "half": Variable((600,), dtype="bfloat16"),
    "wide": Variable((11,), dtype="float64"),
    "mean": Variable((4,), trainable=False, aggregation="mean"),
    "count": Variable((), dtype="int64", trainable=False, aggregation="sum"),
}
TRAINED = [name for name in JOB if name not in ("mean", "count")]


def gradients(seed: int | tuple[int, int]) -> dict[str, np.ndarray]:
    chance = np.random.default_rng(seed)
    return {name: chance.normal(size=JOB[name].shape).astype(JOB[name].dtype) for name in TRAINED}


UPDATES = {"mean": np.full(4, 2.5, np.float32), "count": np.array(1)}


def train(worker: ParameterClient, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        worker.pull()
        worker.push(gradients((seed, step)), updates=UPDATES)


def state(servers: ShardServers) -> dict[tuple[str, str], bytes]:
    """Returns the values and slots of every variable, which do not depend on the shards."""
    found: dict[tuple[str, str], dict[int, bytes]] = {}
    for store in servers.stores:
        for shard in (each for group in store.hosted.all() for each in group.shards):
            for arena in shard.arenas:
                for part in arena.layout.slices:
                    width = int(np.prod(JOB[part.variable].shape[1:], dtype=int))
                    cut = slice(part.offset, part.offset + (part.row_stop - part.row_start) * width)
                    for kind, array in (("value", arena.values), *arena.slots.items()):
                        pieces = found.setdefault((part.variable, kind), {})
                        pieces[part.row_start] = array[cut].tobytes()
    return {key: b"".join(pieces[row] for row in sorted(pieces)) for key, pieces in found.items()}


def servers_of(
    root: str | Path, count: int, shards: int, mode: consistency.Consistency | None = None, **options: Any
) -> ShardServers:
    return ShardServers(
        JOB,
        servers=count,
        shards=shards,
        mode=mode,
        optimizer=optim.Adam(0.1),
        checkpoints=root,
        **options,
    )


RESHARDED = run_lengths.runs(1, 5)
NUMBERS = ((1, 1), (2, 3), (5, 7))  # of servers and shards


@pytest.mark.timeout(60 + 30 * RESHARDED)
@pytest.mark.parametrize("mode", [consistency.Asynchronous(), consistency.Synchronous()], ids=["async", "sync"])
def test_checkpoint_of_three_servers_is_restored_on_any_number(tmp_path: Path, mode: consistency.Consistency) -> None:
    with run_lengths.count_runs("reshard_restore", RESHARDED * len(NUMBERS), "s to restore") as counted:
        for run in range(RESHARDED):
            root, seed = tmp_path / str(run), 2 * run
            with servers_of(root, 3, 5, mode, seed=seed) as servers:
                with servers.worker("a") as worker:
                    train(worker, 4, seed)
                    saved, manifest = state(servers), servers.save()
                    assert (manifest.version, manifest.step) == (4, 4)
                    assert state(servers) == saved
                    train(worker, 3, seed + 1)
                trained = state(servers)
            assert trained != saved
            for count, shards in NUMBERS:
                with servers_of(root, count, shards, mode, seed=99) as others:
                    start = time.monotonic()
                    others.restore(manifest)
                    took = time.monotonic() - start
                    assert state(others) == saved
                    assert set(others.versions()) == {4}
                    with others.worker("b") as worker:
                        assert worker.step == 4
                        train(worker, 3, seed + 1)
                    assert state(others) == trained
                counted.passes(took)


def test_servers_save_to_s3_and_others_restore_from_there(s3: str) -> None:
    with servers_of(f"{s3}/contract", 2, 3) as servers:
        with servers.worker("a") as worker:
            train(worker, 2)
        saved, manifest = state(servers), servers.save()
    Catalogue(open_storage(f"{s3}/contract")).verify(manifest)
    with servers_of(f"{s3}/contract", 1, 2, seed=9) as others:
        others.restore(manifest)
        assert state(others) == saved


def test_checkpoint_has_the_cut_while_training_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    write = LocalStorage.write

    def slow(folder: LocalStorage, path: tuple[str, str, str], pieces: Iterator[Any] | list[bytes]) -> None:
        assert go_on.wait(60)
        write(folder, path, pieces)

    monkeypatch.setattr(LocalStorage, "write", slow)
    with servers_of(tmp_path, 2, 3) as servers, servers.worker("a") as worker:
        train(worker, 2)
        saved = state(servers)
        cut = servers.cut(servers.hold())
        train(worker, 3, seed=1)
        go_on.set()
        manifest = servers.publish(cut)
    with servers_of(tmp_path, 1, 1) as others:
        others.restore(manifest)
        assert state(others) == saved


CUTS = run_lengths.runs(10, 50)


@pytest.mark.timeout(60 + 10 * CUTS)
def test_cuts_under_load_are_consistent_over_all_shards(tmp_path: Path) -> None:
    """Each push adds 1 to a counter of every shard. In a checkpoint the counters are equal, whenever it is cut."""
    counters = {
        f"count{number}": Variable((), dtype="int64", trainable=False, aggregation="sum") for number in range(6)
    }
    job = {"w": Variable((64, 8), partitioner=FixedShards(6)), **counters}
    stop = threading.Event()

    def load(worker: ParameterClient) -> None:
        with worker:
            while not stop.is_set():
                worker.pull()
                ones = {"w": np.ones((64, 8), np.float32)}
                worker.push(ones, updates=dict.fromkeys(counters, np.array(1)))

    took = []
    with ShardServers(job, servers=3, shards=6, optimizer=optim.SGD(1.0), checkpoints=tmp_path) as servers:
        assert len({shard.server for shard in servers.placement.shards}) == 3
        before = servers.values()["w"]
        threads = [threading.Thread(target=load, args=[servers.worker(name)]) for name in "abc"]
        for thread in threads:
            thread.start()
        try:
            manifests: list[Manifest] = []
            for number in range(1, CUTS + 1):
                # A cut before the first push, or two without one between, would show little.
                last = manifests[-1].version if manifests else 0

                def pushed(last: int = last) -> bool:
                    return min(servers.versions()) > last

                wait_until(pushed, what="a push since the last cut")
                start = time.monotonic()
                manifests.append(servers.save(number, cut=number))
                took.append(time.monotonic() - start)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    assert [manifest.version for manifest in manifests] == sorted({manifest.version for manifest in manifests})
    with run_lengths.count_runs("consistent_cut", CUTS, "s to save under load") as counted:
        for manifest, seconds in zip(manifests, took, strict=True):
            with ShardServers(job, shards=1, optimizer=optim.SGD(1.0), checkpoints=tmp_path) as others:
                others.restore(manifest)
                values = others.values()
            assert {int(values[name]) for name in counters} == {manifest.version}
            np.testing.assert_allclose(values["w"], before - manifest.version, rtol=1e-4)
            counted.passes(seconds)


def test_a_push_that_is_half_committed_is_in_the_cut_on_all(tmp_path: Path) -> None:
    with servers_of(tmp_path, 2, 2) as servers, servers.worker("a") as worker:
        train(worker, 1)
        first, second = worker.servers.connections
        push = worker.prepare(gradients(5), UPDATES, 1.0)
        for link in (first, second):
            link.push(worker.pusher.header(link, push, commit=False), push.payload_for(link))
        stamp = worker.servers.stamp(push.step)
        first.commit(pb.CommitRequest(stamp=stamp, shards=first.indices))
        manifest = servers.save()
        assert manifest.version == 2
        assert servers.versions() == [2, 2]
        reply = second.commit(pb.CommitRequest(stamp=stamp, shards=second.indices))  # comes late
        assert {shard.outcome for shard in reply.shards} == {pb.ACCEPTED}
        assert servers.versions() == [2, 2]


def test_a_checkpoint_of_other_variables_is_refused_by_name_and_nothing_changes(tmp_path: Path) -> None:
    with servers_of(tmp_path, 1, 2) as servers:
        manifest = servers.save()
    others = {
        **{name: variable for name, variable in JOB.items() if name != "wide"},
        "bias": Variable((31,)),
        "new": Variable((2,)),
    }
    with ShardServers(others, optimizer=optim.Adam(0.1), checkpoints=tmp_path) as servers:
        before = servers.values()
        with pytest.raises(errors.IncompatibleCheckpoint) as refused:
            servers.restore(manifest)
        for said in ("'bias' was saved as float32[30], but is float32[31]", "'new' was not saved", "'wide' was saved"):
            assert said in str(refused.value)
        assert str(refused.value).endswith(
            "give the changed variables other names in the program and use a partial restore"
        )
        with pytest.raises(errors.IncompatibleCheckpoint, match=r"'bias' .* give it another name in the program$"):
            servers.restore(manifest, partial=True)
        after = servers.values()
        assert all(np.array_equal(before[name], after[name]) for name in before)


def test_partial_restore_takes_the_common_variables(tmp_path: Path) -> None:
    with servers_of(tmp_path, 2, 2) as servers:
        with servers.worker("a") as worker:
            train(worker, 2)
        manifest, values = servers.save(), servers.values()
    others = {"kernel": JOB["kernel"], "head": Variable((3,))}
    with ShardServers(others, optimizer=optim.SGD(0.1), seed=3, checkpoints=tmp_path) as servers:
        before = servers.values()["head"]
        servers.restore(manifest, partial=True)
        restored = servers.values()
        assert restored["kernel"].tobytes() == values["kernel"].tobytes()
        assert restored["head"].tobytes() == before.tobytes()


@pytest.mark.parametrize("block", [1 << 10, 4 << 20], ids=["in mid-restore", "at once"])
def test_a_damaged_file_is_never_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", block)
    monkeypatch.setattr(manifest_module, "BLOCK_BYTES", block)
    with servers_of(tmp_path, 1, 1) as servers:
        manifest = servers.save()
    file = tmp_path / "job" / "00000001" / manifest.files[0].name
    text = bytearray(file.read_bytes())
    text[-1] ^= 1
    file.write_bytes(text)
    with servers_of(tmp_path, 1, 1) as servers:
        before = state(servers)
        with pytest.raises(errors.CorruptCheckpoint, match="do not match their checksum"):
            servers.restore(manifest)
        if block > len(text):
            assert state(servers) == before  # nothing was changed yet
        else:
            with pytest.raises(errors.UnknownJob):
                servers.values()  # neither what it was nor what it should be


def test_a_server_opens_only_the_files_with_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a manifest of an earlier version does not list the files' contents, the server opens all files."""
    with servers_of(tmp_path, 3, 6) as servers:
        manifest, before = servers.save(), state(servers)
    opened: list[str] = []
    real = LocalStorage.open

    def note(folder: LocalStorage, path: Sequence[str]) -> Any:
        opened.append(path[-1])
        return real(folder, path)

    monkeypatch.setattr(LocalStorage, "open", note)
    files = {file.name for file in manifest.files}
    with servers_of(tmp_path, 3, 6) as servers:
        servers.restore(manifest)
        assert state(servers) == before
        tensors = sorted(name for name in opened if name in files)
        assert tensors == sorted(files), "each by one server"
        earlier = replace(manifest, files=tuple(replace(file, tensors=()) for file in manifest.files))
        Catalogue(LocalStorage(tmp_path)).publish(earlier)
        opened.clear()
        servers.restore(earlier)
        assert state(servers) == before
        assert len([name for name in opened if name in files]) == 3 * len(files)
        wrong = replace(manifest.files[0], tensors=manifest.files[0].tensors[:-1])
        Catalogue(LocalStorage(tmp_path)).publish(replace(manifest, files=(wrong, *manifest.files[1:])))
        with pytest.raises(errors.CorruptCheckpoint):
            servers.restore(manifest)


def test_a_restore_that_hangs_holds_nothing_that_others_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds neither the lock of its shards nor the only thread of calls. If the shards are dropped, it ends."""
    with servers_of(tmp_path, 1, 2) as servers:
        manifest = servers.save()
    reading, answers = threading.Event(), threading.Event()
    reads: list[TensorReader] = []
    real = TensorReader.fill

    def hang(reader: TensorReader, pieces: Any) -> None:
        if threading.current_thread().name.startswith("restores"):
            reads.append(reader)
            if len(reads) == 3:  # the header of the first file is read
                reading.set()
                assert answers.wait(60)
        real(reader, pieces)

    monkeypatch.setattr(TensorReader, "fill", hang)
    with servers_of(tmp_path, 1, 2, rpc_threads=1) as servers:
        request = pb.RestoreRequest(job="job", generation=1, from_job="job", number=manifest.number, version=1, step=1)
        restore = servers.stubs[0].Restore.future(request, timeout=60)
        assert reading.wait(30)
        assert servers.stores[0].queues() == (0, 0, 0)
        with pytest.raises(errors.NotPlaced, match="are being restored"):
            servers.values()
        with pytest.raises(errors.StorageFailed, match="an earlier restore of job waits for the checkpoint storage"):
            servers.restore(manifest)
        servers.each("DropShards", pb.DropShardsRequest(job="job"))
        answers.set()
        with pytest.raises((errors.Cancelled, errors.UnknownJob)), _rpc.as_shoal_errors("it"):
            restore.result()


def test_a_restore_whose_caller_is_gone_ends_and_can_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with servers_of(tmp_path, 1, 2) as servers:
        manifest, before = servers.save(), state(servers)
    loaded: list[Arena] = []
    real = writer.load

    def load(saved: Any, arena: Arena, *arguments: Any, **options: Any) -> None:
        loaded.append(arena)
        if len(loaded) == 2:
            raise errors.Cancelled("the caller is gone")
        real(saved, arena, *arguments, **options)

    monkeypatch.setattr("shoal_server.checkpoints.cut_session.load", load)
    with servers_of(tmp_path, 1, 2) as servers:
        request = pb.RestoreRequest(job="job", generation=1, from_job="job", number=manifest.number)
        with pytest.raises(errors.Cancelled, match="its caller or its shards are gone"):
            cut_session.restore(servers.stores[0], LocalStorage(tmp_path), request, lambda: False)
        assert not loaded
        with pytest.raises(errors.Cancelled, match="the caller is gone"):
            servers.restore(manifest)
        with pytest.raises(errors.NotPlaced):
            servers.values()
        servers.restore(manifest)
        assert state(servers) == before


def test_a_checkpoint_is_restored_before_training_begins(tmp_path: Path) -> None:
    with servers_of(tmp_path, 1, 1) as servers:
        manifest = servers.save()
        with servers.worker("a") as worker:
            train(worker, 1)
            with pytest.raises(errors.BadRequest, match="training has begun"):
                servers.restore(manifest)


@contextmanager
def full_disk(root: Path) -> Iterator[str]:
    """The kernel refuses to let files grow, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        yield "File too large; raise the limit"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def failing_disk(root: Path) -> Iterator[str]:
    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        yield "Input/output error"


@contextmanager
def read_only_folder(root: Path) -> Iterator[str]:
    """Makes the creation of files fail for all users, including root."""
    real = os.open

    def refused(path: str | Path, flags: int, *rest: int, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, flags, *rest, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refused)
        yield "Read-only file system; its file system is read-only: mount a volume there"


@contextmanager
def no_storage_message(root: Path) -> Iterator[str]:
    """Puts a file in the place of the storage's folder."""
    shutil.rmtree(root, ignore_errors=True)
    root.write_text("")
    yield "could not be written"
    root.unlink()


@contextmanager
def link_out(root: Path) -> Iterator[str]:
    """The job's folder is a link that leads out of the root."""
    root.mkdir(exist_ok=True)
    outside = root.parent / "outside"
    outside.mkdir()
    (root / "job").symlink_to(outside)
    yield "could not be written"
    (root / "job").unlink()
    assert not [*outside.iterdir()]


@pytest.mark.parametrize("cause", [full_disk, failing_disk, read_only_folder, no_storage_message, link_out])
def test_a_disk_that_fails_fails_the_checkpoint_and_not_the_training(
    tmp_path: Path, cause: Callable[[Path], AbstractContextManager[str]]
) -> None:
    root = tmp_path / "checkpoints"
    with (
        run_lengths.count_runs("full_disk", 1, "s until training goes on") as counted,
        servers_of(root, 2, 2) as servers,
        servers.worker("a") as worker,
    ):
        train(worker, 1)
        with cause(root) as said, pytest.raises(errors.StorageFailed, match=said):
            servers.save(1)
        # The other server may still be about its own file.
        wait_until(lambda: not [*root.glob("job/*/.tmp-*")], what="the end of what was begun")
        assert not Catalogue(LocalStorage(root)).numbers("job")
        train(worker, 1, seed=1)
        after = state(servers)
        assert servers.save(2, cut=2).version == 2
        assert servers.versions() == [2, 2]
        counted.passes(0)
    assert Catalogue(LocalStorage(root)).numbers("job") == [2]
    with servers_of(root, 1, 1) as others:
        others.restore(Catalogue(LocalStorage(root)).manifest("job", 2))
        assert state(others) == after


@pytest.mark.parametrize("job", ["../job", "a/b", "a\0b", "/etc", "..", ""])
def test_a_restore_does_not_leave_the_folder(tmp_path: Path, job: str) -> None:
    with servers_of(tmp_path, 1, 1) as servers:
        before = state(servers)
        with pytest.raises(errors.BadRequest, match="not a valid name"):
            servers.restore(replace(servers.save(), job=job))
        assert state(servers) == before


def test_a_manifest_that_leads_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret")
    root = tmp_path / "checkpoints"
    with servers_of(root, 1, 1) as servers:
        manifest = servers.save()
        entry = replace(manifest.files[0], name="../../../secret")
        led_out = replace(manifest, number=2, files=(entry,))
        Catalogue(LocalStorage(root)).publish(led_out)
        with pytest.raises(errors.BadRequest, match="not a valid name"):
            servers.restore(led_out)


def test_a_checkpoint_of_a_later_shoal_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers_of(tmp_path, 1, 1) as servers:
        with monkeypatch.context() as patch:
            patch.setattr(manifest_module, "VERSION", 5)
            manifest = servers.save()
        before = state(servers)
        with pytest.raises(errors.IncompatibleCheckpoint, match="schema 5, but this version of Shoal reads up to 4"):
            servers.restore(manifest)
        assert state(servers) == before


def test_a_server_without_a_folder_says_so(tmp_path: Path) -> None:
    with (
        ShardServers(JOB) as servers,
        pytest.raises(errors.StorageFailed, match=r"^server server-0 has no checkpoint storage.* --checkpoints"),
    ):
        servers.save()


def test_a_cut_that_comes_too_late_saves_nothing(tmp_path: Path) -> None:
    with servers_of(tmp_path, 1, 1) as servers:
        servers.hold(cut=1)
        committed = servers.hold(cut=2)
        with pytest.raises(errors.Cancelled, match="nothing was saved"):
            servers.cut(committed, cut=1)


def test_a_cut_that_fails_on_one_server_holds_back_no_commits_on_the_others(tmp_path: Path) -> None:
    with servers_of(tmp_path, 1, 1) as servers:
        [address] = servers.placement.by_server()
        refs = (ServerRef("s0", address), ServerRef("gone", "127.0.0.1:1"))
        held = HoldResult(None, {}, state_pb2.ProgressRecord())
        channels = ServerChannels(lambda _: 1)
        with closing(channels), pytest.raises(errors.Unreachable):
            checkpoint_cut.take_cut(
                TakeCut(JobRef("job", 1), 1, refs, 1, number=7), ServerCalls(channels, bool), lambda: held
            )
        with pytest.raises(errors.Cancelled, match="nothing was saved"):
            servers.cut({}, cut=7)


def test_a_server_tells_lost_shards_from_a_save_that_it_does_not_have(tmp_path: Path) -> None:
    with servers_of(tmp_path, 1, 1) as servers:
        saved = servers.cut(servers.hold())
        with pytest.raises(errors.UnknownCheckpoint, match="not begun here"):
            servers.publish(saved, number=2)
        servers.each("DropShards", pb.DropShardsRequest(job="job"))
        with pytest.raises(errors.UnknownJob):
            servers.publish(saved)


def test_dropping_shards_ends_their_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    write = LocalStorage.write

    def slow(folder: LocalStorage, path: tuple[str, str, str], pieces: Iterator[Any]) -> None:
        begun.set()
        assert go_on.wait(60)
        write(folder, path, pieces)

    monkeypatch.setattr(LocalStorage, "write", slow)
    with servers_of(tmp_path, 1, 2) as servers:
        servers.cut(servers.hold(), cut=1)
        assert begun.wait(60)
        servers.each("DropShards", pb.DropShardsRequest(job="job"))
        go_on.set()
    assert [file.name for file in (tmp_path / "job" / "00000001").iterdir()] == ["shard-00000-1.safetensors"]
