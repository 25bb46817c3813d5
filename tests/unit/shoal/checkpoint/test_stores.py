"""Contract of checkpoint storage, tested for a local folder, memory, and a real S3 server."""

import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal import errors
from shoal._checkpoint import manifest as manifests
from shoal._checkpoint import object_store, tensor_files
from shoal._checkpoint.catalogue import Catalogue, path_of
from shoal._checkpoint.manifest import Manifest
from shoal._checkpoint.object_store import ObjectStore
from shoal._checkpoint.slices import SavedVariables, tensor_name
from shoal._checkpoint.storage import CheckpointStorage, probe
from shoal._checkpoint.storage_urls import open_storage
from shoal._checkpoint.tensor_files import open_tensors, write_tensors
from shoal._cli.app import app
from shoal.checkpoints import Checkpoints

MIB = 1 << 20


@pytest.fixture(params=["local", "memory", "s3"])
def folder(request: pytest.FixtureRequest) -> CheckpointStorage:
    if request.param == "local":
        return open_storage(str(request.getfixturevalue("tmp_path")))
    if request.param == "memory":
        return open_storage(f"memory://{uuid.uuid4().hex}")
    bucket: ObjectStore = request.getfixturevalue("bucket")
    return bucket


@pytest.fixture(scope="module")
def whole_bucket(s3: str) -> ObjectStore:
    return ObjectStore(s3)


@pytest.fixture
def bucket(whole_bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> ObjectStore:
    """A folder of its own for each test, over one client: to make one takes botocore a third of a second."""
    with monkeypatch.context() as patch:
        patch.setattr(object_store, "open_file_system", lambda *_: whole_bucket.file_system)
        return ObjectStore(f"{whole_bucket.url}/{uuid.uuid4().hex}")


def read(folder: CheckpointStorage, *path: str) -> bytes:
    with folder.open(path) as file:
        text = bytearray(file.nbytes)
        file.read_into(0, [memoryview(text)])
        return bytes(text)


def root_of(bucket: ObjectStore) -> str:
    """The bucket's name, and the prefix in it."""
    return bucket.url.removeprefix("s3://")


def uploads(bucket: ObjectStore) -> list[Any]:
    """The uploads that are neither complete nor abandoned."""
    found: list[Any] = bucket.file_system.list_multipart_uploads(root_of(bucket).partition("/")[0])
    return found


# All of them.


def test_file_exists_once_it_is_written(folder: CheckpointStorage) -> None:
    assert folder.names([]) == folder.names(["job"]) == folder.holding(["job"], "a.bin") == []
    folder.write(["job", "00000001", "a.bin"], [b"ab", memoryview(b"cd"), b"", bytearray(b"e")])
    assert read(folder, "job", "00000001", "a.bin") == b"abcde"
    folder.write(["job", "00000001", "a.bin"], [b"f"])
    folder.write(["job", "00000001", "empty"], [])
    assert read(folder, "job", "00000001", "a.bin") == b"f"
    assert read(folder, "job", "00000001", "empty") == b""
    assert folder.names([]) == ["job"]
    assert folder.names(["job", "00000001"]) == ["a.bin", "empty"]


def test_a_probe_leaves_nothing(folder: CheckpointStorage) -> None:
    probe(folder)
    assert folder.names([]) == []


def test_pieces_may_be_of_arrays(folder: CheckpointStorage) -> None:
    x = np.arange(1000, dtype=np.float32)
    folder.write(["x"], [x.view(np.uint8).data, x[500:].data])
    assert read(folder, "x") == x.tobytes() + x[500:].tobytes()


def test_any_range_is_read(folder: CheckpointStorage) -> None:
    text = bytes(range(256)) * 4
    folder.write(["a"], [text])
    with folder.open(["a"]) as file:
        assert file.nbytes == 1024
        for start, size in ((0, 1024), (0, 1), (1023, 1), (300, 500), (5, 0), (1024, 0)):
            target = bytearray(size)
            file.read_into(start, [memoryview(target)])
            assert target == text[start : start + size]
        for start, size in ((1000, 25), (1024, 1), (5000, 5)):
            with pytest.raises(errors.CorruptCheckpoint, match="truncated"):
                file.read_into(start, [memoryview(bytearray(size))])


def test_folders_that_hold_a_name_are_found(folder: CheckpointStorage) -> None:
    for path in (["j", "1", "m"], ["j", "2", "x"], ["j", "3", "m"], ["j", "4", "xm"], ["j", "5", "d", "m"], ["j", "m"]):
        folder.write(path, [b"x"])
    folder.write(["jj", "9", "m"], [b"x"])
    assert folder.holding(["j"], "m") == ["1", "3"]
    assert folder.holding(["j"], "d") in ([], ["5"])  # a folder is something, too, where there are folders
    assert folder.holding(["none"], "m") == folder.holding(["j", "m"], "m") == []
    assert folder.names(["j"]) == ["1", "2", "3", "4", "5", "m"]
    assert folder.names(["j", "m"]) == []


def test_remove_deletes_only_the_named_path(folder: CheckpointStorage) -> None:
    for path in (["job", "1", "a"], ["job", "1", "b"], ["job", "1", "deep", "c"], ["job", "10", "a"], ["job2", "a"]):
        folder.write(path, [b"x"])
    folder.remove(["job", "1", "a"])
    assert folder.names(["job", "1"]) == ["b", "deep"]
    folder.remove(["job", "1"])
    assert folder.names(["job"]) == ["10"]
    folder.remove(["job"])
    assert folder.names([]) == ["job2"]
    folder.remove(["job"])
    folder.remove(["job", "1", "a"])


def test_missing_file_is_unknown_and_folder_is_not_a_file(folder: CheckpointStorage) -> None:
    folder.write(["job", "a"], [b"x"])
    for path in (["b"], ["job", "b"], ["jo"]):
        with pytest.raises(errors.UnknownCheckpoint, match="there is no"):
            folder.open(path).__enter__()
    with pytest.raises(errors.StorageFailed, match="it is not a file"):
        folder.open(["job"]).__enter__()


@pytest.mark.parametrize("name", ["..", ".", "", "a/b", "/etc", "a\0b", ".tmp-1", "a" * 256, "ü", "a\n", "a*", "a?b"])
def test_names_outside_the_folder_are_refused(folder: CheckpointStorage, name: str) -> None:
    uses: Sequence[Callable[[], Any]] = (
        lambda: folder.write([name], [b""]),
        lambda: folder.write([name, "a"], [b""]),
        lambda: folder.open(["a", name]).__enter__(),
        lambda: folder.names([name]),
        lambda: folder.holding([name], "a"),
        lambda: folder.holding(["a"], name),
        lambda: folder.remove([name]),
    )
    for use in uses:
        with pytest.raises(errors.BadRequest, match="not a valid name"):
            use()
    assert folder.names([]) == []


@pytest.mark.parametrize("pieces", [0, 1, 5])
def test_failed_write_keeps_the_previous_file(
    folder: CheckpointStorage, pieces: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 * MIB)  # so that parts of it are uploaded by then
    seen = []

    def torn() -> Iterator[bytes]:
        for _ in range(pieces):
            yield bytes(2 * MIB)
            seen.append((folder.names(["job"]), read(folder, "job", "a")))
        raise KeyError("a defect")

    folder.write(["job", "a"], [b"before"])
    for name in ("a", "b"):
        with pytest.raises(KeyError):
            folder.write(["job", name], torn())
    assert seen == [(["a"], b"before")] * 2 * pieces, "what is being written could be seen"
    assert folder.names(["job"]) == ["a"]
    assert read(folder, "job", "a") == b"before"
    if folder.url.startswith("s3"):
        assert isinstance(folder, ObjectStore)
        assert uploads(folder) == []
        assert len(folder.file_system.find(root_of(folder))) == 1
    folder.write(["job", "b"], [b"after"])
    assert read(folder, "job", "b") == b"after"


def test_a_file_of_many_parts(folder: CheckpointStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 * MIB)
    text = np.random.default_rng(1).bytes(23 * MIB + 17)
    folder.write(["a"], (text[start : start + 3 * MIB] for start in range(0, len(text), 3 * MIB)))
    assert read(folder, "a") == text


def test_a_checkpoint_is_written_found_read_and_removed(folder: CheckpointStorage) -> None:
    catalogue = Catalogue(folder)
    kernel = np.arange(60, dtype=np.float32).reshape(10, 6)
    first, second = (save(catalogue, number, kernel + number) for number in (1, 2))
    write_tensors(folder, (*path_of("digits", 3), "torn.safetensors"), *of({"x": kernel}))
    save(catalogue, 1, kernel, "other")
    assert catalogue.jobs() == ["digits", "other"]
    assert catalogue.numbers("digits") == [1, 2]
    assert catalogue.next_number("digits") == 4
    assert list(catalogue.newest("digits")) == [second, first]
    for manifest in (first, second):
        catalogue.verify(manifest)
        with SavedVariables(folder, manifest) as saved:
            target = np.empty(30, np.float32)
            saved.read(("value", "dense/kernel", 2, target))
            assert np.array_equal(target.reshape(5, 6), kernel[2:7] + manifest.number)
    assert [str(it) for it in Checkpoints(folder.url).list()] == ["digits/2", "digits/1", "other/1"]
    assert catalogue.remove_incomplete("digits") == [3]
    catalogue.remove("digits", 2)
    assert catalogue.numbers("digits") == [1]
    assert folder.names(["digits"]) == ["00000001"]


def save(catalogue: Catalogue, number: int, kernel: np.ndarray, job: str = "digits") -> Manifest:
    entries = []
    for shard, (start, stop) in enumerate(((0, 4), (4, 10))):
        path = (*path_of(job, number), f"shard-{shard}.safetensors")
        tensors = {tensor_name("value", start, "dense/kernel"): kernel[start:stop]}
        entries.append(write_tensors(catalogue.folder, path, *of(tensors)))
    manifest = Manifest(job, number, 0.0, 1, 1, {}, (), tuple(entries))
    catalogue.publish(manifest)
    return manifest


def of(tensors: dict[str, np.ndarray]) -> tuple[list[Any], list[Any]]:
    return [(name, it.dtype, it.shape) for name, it in tensors.items()], [
        it.reshape(-1).view(np.uint8).data for it in tensors.values()
    ]


def test_a_damaged_checkpoint_is_not_read(folder: CheckpointStorage) -> None:
    catalogue = Catalogue(folder)
    manifest = save(catalogue, 1, np.ones((10, 6), np.float32))
    path = (*path_of("digits", 1), manifest.files[1].name)
    text = bytearray(read(folder, *path))
    text[-3] ^= 4
    folder.write(path, [text])
    with pytest.raises(errors.CorruptCheckpoint, match="shard-1"):
        catalogue.verify(manifest)
    folder.write(path, [text[:-5]])
    with pytest.raises(errors.CorruptCheckpoint, match="shard-1"):
        SavedVariables(folder, manifest)
    folder.remove(path)
    with pytest.raises(errors.CorruptCheckpoint, match="missing"):
        SavedVariables(folder, manifest)


# Object stores.


def test_jobs_are_found_with_one_listing_each(bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = Catalogue(bucket)
    for job in ("digits", "other"):
        for number in range(1, 6):
            save(catalogue, number, np.ones((10, 6), np.float32), job)
    listed: list[str] = []

    def spy(listing: Callable[..., list[str]]) -> Callable[..., list[str]]:
        def list_below(path: str, **options: Any) -> list[str]:
            listed.append(path.removeprefix(root_of(bucket)))
            return listing(path, **options)

        return list_below

    for name in ("ls", "find"):
        monkeypatch.setattr(bucket.file_system, name, spy(getattr(bucket.file_system, name)))
    assert catalogue.jobs() == ["digits", "other"]
    assert listed == ["", "/digits", "/other"]


def test_blocks_of_an_object_are_read_side_by_side(bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (tensor_files, manifests):
        monkeypatch.setattr(module, "BLOCK_BYTES", 1 << 10)
    x = np.arange(5000, dtype=np.float32)
    entry = write_tensors(bucket, ["f.safetensors"], *of({"x": x}))
    together = threading.Barrier(4)
    real = bucket.file_system.cat_file

    def side_by_side(path: str, start: int, end: int) -> Any:
        if 4096 <= start < 8192:
            together.wait(30)
        return real(path, start=start, end=end)

    with open_tensors(bucket, ["f.safetensors"], entry) as reader:
        monkeypatch.setattr(bucket.file_system, "cat_file", side_by_side)
        reader.verify()
        target = np.empty_like(x)
        reader.fill([reader.place("x", target)])
        assert np.array_equal(target, x)
    text = bytearray(read(bucket, "f.safetensors"))
    text[9000] ^= 1
    bucket.write(["f.safetensors"], [text])
    with open_tensors(bucket, ["f.safetensors"], entry) as reader, pytest.raises(errors.CorruptCheckpoint):
        reader.verify()


def test_writes_of_another_client_are_visible_at_once(bucket: ObjectStore) -> None:
    other = ObjectStore(bucket.url)
    assert bucket.names(["job"]) == []
    other.write(["job", "a"], [b"1"])
    assert bucket.names(["job"]) == ["a"]
    assert read(bucket, "job", "a") == b"1"
    other.write(["job", "a"], [b"22"])
    assert read(bucket, "job", "a") == b"22"


@pytest.mark.parametrize("at", ["create_multipart_upload", "upload_part", "complete_multipart_upload", "put_object"])
def test_an_upload_that_the_store_breaks_off_leaves_nothing(
    bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.setattr(object_store, "PART_BYTES", 5 * MIB)
    calls = bucket.file_system.call_s3
    bucket.write(["job", "a"], [b"before"])

    def broken(method: str, *rest: Any, **more: Any) -> Any:
        if method == at and more.get("PartNumber", 2) == 2:
            raise OSError(5, "the disks of the store are on fire")
        return calls(method, *rest, **more)

    monkeypatch.setattr(bucket.file_system, "call_s3", broken)
    text = b"after" if at == "put_object" else bytes(12 * MIB)
    with pytest.raises(errors.StorageFailed, match=r"/job/a could not be written: .*on fire; check the network"):
        bucket.write(["job", "a"], [text])
    monkeypatch.undo()
    assert uploads(bucket) == []
    assert read(bucket, "job", "a") == b"before"
    assert bucket.names(["job"]) == ["a"]


def test_the_commands_take_a_url(bucket: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "open_file_system", lambda *_: bucket.file_system)
    url = bucket.url
    kernel = np.arange(60, dtype=np.float32).reshape(10, 6)
    save(Catalogue(open_storage(url)), 1, kernel)
    file = tmp_path / "out.safetensors"
    for command, said in (
        (["checkpoints", "ls"], "digits/1"),
        (["export", "digits", str(file)], "digits/1"),
        (["import", str(file), "tuned"], "as tuned/1: "),
    ):
        result = CliRunner().invoke(app, [*command, "--checkpoints", url])
        assert result.exit_code == 0, result.output
        assert said in result.stdout
    assert np.array_equal(Checkpoints(url).read("tuned")["dense/kernel"], kernel)


def test_missing_bucket_raises_an_error_with_advice(s3: str) -> None:
    store = ObjectStore("s3://no-such-bucket/x")
    for use in (lambda: store.write(["a"], [b""]), lambda: store.names([]), lambda: store.holding(["a"], "b")):
        with pytest.raises(errors.StorageFailed, match="create the bucket, or choose another"):
            use()
    with pytest.raises((errors.StorageFailed, errors.UnknownCheckpoint)):
        store.open(["a"]).__enter__()


def test_missing_credentials_raise_an_error_with_advice(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    store = ObjectStore(f"{s3}/x")
    for use in (lambda: store.write(["a"], [b"x"]), lambda: store.names([]), lambda: store.open(["a"]).__enter__()):
        with pytest.raises(errors.StorageFailed, match="credentials by the environment"):
            use()


def test_refused_access_raises_an_error_without_secrets(bucket: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise PermissionError("The AWS Access Key Id you provided does not exist in our records.")

    for name in ("open", "ls", "info", "find"):
        monkeypatch.setattr(bucket.file_system, name, refused)
    for use in (
        lambda: bucket.write(["a"], [b"x"]),
        lambda: bucket.names([]),
        lambda: bucket.open(["a"]).__enter__(),
        lambda: bucket.remove(["a"]),
    ):
        with pytest.raises(errors.StorageFailed, match="allow Shoal to list, read, write and remove") as told:
            use()
        assert told.value.__cause__ is None


def test_store_that_does_not_answer_fails_soon(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://me:hunter2@127.0.0.1:1")
    once = {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
    monkeypatch.setattr(object_store, "OPTIONS", {"s3": once})
    with pytest.raises(errors.StorageFailed, match="check the network") as told:
        ObjectStore(f"{s3}/x").names([])
    assert "hunter2" not in told.value.message


@pytest.mark.parametrize(
    "url",
    ["s3://", "s3:///a", "s3://bucket/../other", "s3://bucket//a", "s3://bucket/a?versionId=1", "s3://b/*", "memory://",
     "s3://bucket/ü", "nothing://bucket/a", "S3 ://bucket"],
)  # fmt: skip
def test_invalid_urls_are_refused(url: str) -> None:
    with pytest.raises(errors.BadRequest):
        open_storage(url)


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(errors.BadRequest, match="into the environment") as told:
        open_storage("s3://me:hunter2@bucket/a")
    assert "hunter2" not in str(told.value)
    assert "hunter2" not in str(told.value.details)


# fsspec remembers the packages that it has imported, so the second one is of a store that no test uses.
@pytest.mark.parametrize(("package", "url"), [("fsspec", "s3://bucket"), ("gcsfs", "gs://bucket")])
def test_missing_package_is_named(package: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(errors.BadRequest, match=r"pip install 'shoal\[s3\]'"):
        open_storage(url)


def test_local_path_has_several_url_forms(tmp_path: Path) -> None:
    assert open_storage(f"file://{tmp_path}").url == open_storage(f"local://{tmp_path}").url == str(tmp_path)
