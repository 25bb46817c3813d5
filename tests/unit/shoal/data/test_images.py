"""Image data sets from idx files, CIFAR-10 and folders: their samples, and the errors about bad files."""

import gzip
import io
import os
import struct
import tarfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import shoal
from shoal import errors
from shoal._wire import DataRange, Lease, NoRange
from shoal.data import Cifar10, Idx, ImageFolder
from shoal_worker.batches import LeasedBatches
from support import waiting

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (7, 5, 4), np.uint8)
LABELS = RNG.integers(0, 10, 7, np.uint8)
CODES = {"u1": 8, "i1": 9, ">i2": 11, ">i4": 12, ">f4": 13, ">f8": 14}


def refused(said: str) -> pytest.RaisesExc:
    return pytest.raises(errors.InvalidData, match=said)


def idx(array: np.ndarray, kind: str = "u1") -> bytes:
    return (
        bytes([0, 0, CODES[kind], array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(kind).tobytes()
    )


def write(path: Path, content: bytes, *, packed: bool) -> Path:
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


@pytest.fixture(params=[False, True], ids=["plain", "gzip"])
def packed(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


# idx.


@pytest.fixture
def labels(tmp_path: Path) -> Path:
    return write(tmp_path / "labels", idx(LABELS), packed=False)


def test_idx_gives_images_with_channels_and_labels(tmp_path: Path, labels: Path, packed: bool) -> None:
    dataset = Idx(write(tmp_path / "images", idx(IMAGES), packed=packed), str(labels))
    assert isinstance(dataset, shoal.Dataset)
    x, y = dataset.batch(np.array([6, 0, 3]))
    assert (len(dataset), x.dtype, y.dtype) == (7, np.dtype(np.uint8), np.dtype(np.int64))
    np.testing.assert_array_equal(x, IMAGES[[6, 0, 3], ..., np.newaxis])
    np.testing.assert_array_equal(y, LABELS[[6, 0, 3]])


@pytest.mark.parametrize("kind", CODES)
def test_idx_of_every_type_comes_in_the_machine_s_byte_order(tmp_path: Path, kind: str, packed: bool) -> None:
    values = RNG.integers(0, 100, (3, 2, 2, 3))
    dataset = Idx(
        write(tmp_path / "x", idx(values, kind), packed=packed),
        write(tmp_path / "y", idx(np.array([2, 300, 70000]), ">i4"), packed=packed),
    )
    x, y = dataset.batch(np.arange(3))
    assert x.dtype == np.dtype(kind).newbyteorder("=")
    np.testing.assert_array_equal(x, values)
    assert y.tolist() == [2, 300, 70000]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x89PNG....", "begins with the bytes 89 50 4e 47 and is not an idx file"),
        (b"\0\0\x0a\3" + bytes(20), "begins with the bytes 00 00 0a 03"),
        (b"\0\0\x08\0", "begins with the bytes 00 00 08 00"),
        (idx(IMAGES)[:9], "ends within its header; it is truncated"),
        (idx(IMAGES)[:-1], "7 x 5 x 4 numbers of 1 bytes, 140 bytes in all, but the file holds 139; copy"),
        (idx(IMAGES) + b"!", "140 bytes in all, but the file holds (141|more); copy"),
        (idx(IMAGES[:0]), r"has the dimensions \(0, 5, 4\), so it contains no samples"),
        (idx(IMAGES[0]), r"has the dimensions \(5, 4\); images are \[n, height, width\]"),
        (idx(IMAGES[:3]), "has 3 images, but .* 7 labels"),
        (b"\0\0\x0e\xff" + b"\xff" * 1020, "declares .* in all, but"),
    ],
)
def test_invalid_idx_file_is_refused(tmp_path: Path, labels: Path, content: bytes, said: str, packed: bool) -> None:
    with refused(rf"images.*{said}"):
        Idx(write(tmp_path / "images", content, packed=packed), labels)


def test_idx_with_invalid_labels_is_refused(tmp_path: Path, labels: Path) -> None:
    with refused("labels are whole numbers in one dimension"):
        Idx(write(tmp_path / "x", idx(IMAGES), packed=False), write(tmp_path / "y", idx(IMAGES), packed=False))
    with refused("labels are whole numbers in one dimension"):
        Idx(tmp_path / "x", write(tmp_path / "y", idx(LABELS, ">f4"), packed=False))


def test_idx_that_is_missing_empty_or_remote_is_refused(tmp_path: Path, labels: Path) -> None:
    with refused("none does not exist"):
        Idx(tmp_path / "none", labels)
    with refused("empty is empty"):
        Idx(write(tmp_path / "empty", b"", packed=False), labels)
    with refused("cannot be mapped"):
        Idx("s3://bucket/images", labels)


def test_damaged_gzip_is_refused(tmp_path: Path, labels: Path) -> None:
    content = gzip.compress(idx(IMAGES))
    (tmp_path / "images").write_bytes(content[:-20])
    with refused("images (cannot be read|says)"):
        Idx(tmp_path / "images", labels)
    (tmp_path / "images").write_bytes(content[:-8] + b"\0\0\0\0" + content[-4:])
    with refused("images cannot be read: CRC"):
        Idx(tmp_path / "images", labels)


def test_gzip_is_not_unpacked_beyond_the_limit(tmp_path: Path, labels: Path) -> None:
    with refused("140 bytes in all, but max_bytes is 100; raise it, or copy"):
        Idx(write(tmp_path / "images", idx(IMAGES), packed=True), labels, max_bytes=100)
    huge = bytes([0, 0, 8, 3]) + struct.pack(">3I", 1 << 10, 1 << 10, 1 << 10)
    with refused("a gzip file of this size cannot hold so many; copy"):
        Idx(write(tmp_path / "images", huge, packed=True), labels)


# CIFAR-10.

CIFAR = RNG.integers(0, 256, (4, 3072), np.uint8)
CLASSES = ["airplane", "automobile", "bird"]


def binary(images: np.ndarray, labels: list[int]) -> bytes:
    """A batch as it is published."""
    return np.column_stack([np.array(labels, np.uint8), images]).tobytes()


def meta(names: list[str] = CLASSES) -> bytes:
    """The names as they are published: with an empty line behind them."""
    return "".join(f"{name}\n" for name in [*names, ""]).encode()


@pytest.fixture
def cifar(tmp_path: Path) -> Path:
    (tmp_path / "batches.meta.txt").write_bytes(meta())
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}.bin").write_bytes(binary(CIFAR + number, [0, 1, 2, number % 3]))
    (tmp_path / "test_batch.bin").write_bytes(binary(CIFAR, [2, 1, 0, 2]))
    return tmp_path


def test_cifar_of_more_images_than_are_written_at_a_time(cifar: Path) -> None:
    images = RNG.integers(0, 256, (1001, 3072), np.uint8)
    labels = RNG.integers(0, 3, 1001).tolist()
    (cifar / "test_batch.bin").write_bytes(binary(images, labels))
    x, y = Cifar10(cifar, train=False).batch(np.arange(1001))
    np.testing.assert_array_equal(x, images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    assert y.tolist() == labels


def test_cifar_as_it_is_published(cifar: Path) -> None:
    train, test = Cifar10(cifar), Cifar10(str(cifar), train=False)
    assert (len(train), len(test), train.classes) == (20, 4, tuple(CLASSES))
    x, y = train.batch(np.array([19, 0]))
    np.testing.assert_array_equal(x[0], (CIFAR[3] + 5).reshape(3, 32, 32).transpose(1, 2, 0))
    np.testing.assert_array_equal(x[1], (CIFAR[0] + 1).reshape(3, 32, 32).transpose(1, 2, 0))
    assert (x.dtype, y.dtype, y.tolist()) == (np.dtype(np.uint8), np.dtype(np.int64), [2, 0])
    assert test.batch(np.arange(4))[1].tolist() == [2, 1, 0, 2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty; unpack the archive again"),
        (
            binary(CIFAR, [0, 1, 2, 0])[:-9],
            "has 12,283 bytes, .* has 3,073 with its label: it is cut short after 3 images",
        ),
        (binary(CIFAR, [0, 1, 2, 0])[:3072], "cut short after 0 images"),
        (b"\0" + binary(CIFAR, [0, 1, 2, 0]), "has 12,293 bytes"),
        (binary(CIFAR, [0, 1, 3, 0]), "has the label 3 for image 2, at byte 6,146, and labels are from 0 to 2"),
    ],
)
def test_damaged_cifar_is_refused(cifar: Path, content: bytes, said: str) -> None:
    (cifar / "test_batch.bin").write_bytes(content)
    with refused(rf"test_batch.bin.*{said}"):
        Cifar10(cifar, train=False)


def test_cifar_truncated_between_two_images_is_refused(cifar: Path) -> None:
    (cifar / "data_batch_4.bin").write_bytes(binary(CIFAR, [0, 1, 2, 0])[: 2 * 3073])
    with refused("data_batch_4.bin has 2 images, and another batch has 4: it is cut short; unpack the archive again"):
        Cifar10(cifar)


def test_cifar_with_any_bytes_changed_is_read_or_refused(cifar: Path) -> None:
    content = binary(CIFAR[:1], [1])
    outcomes = []
    for place in [*range(280), *range(len(content) - 120, len(content))]:
        for byte in (0, 40, 98, 255):
            (cifar / "test_batch.bin").write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
            try:
                Cifar10(cifar, train=False)
                outcomes.append("read")
            except errors.InvalidData:
                outcomes.append("refused")
    assert outcomes.count("refused") == 3, "of the values at byte 0, only 0 is a label"


def test_cifar_files_that_are_missing_too_large_or_without_classes_are_refused(cifar: Path) -> None:
    (cifar / "data_batch_3.bin").unlink()
    with refused(
        r"data_batch_3.bin does not exist; .* download https://\S+/cifar-10-binary.tar.gz, and give its path, or unpack"
    ):
        Cifar10(cifar)
    os.truncate(cifar / "test_batch.bin", 1 << 30)
    with refused("test_batch.bin cannot be read: it has more than 67,108,864 bytes"):
        Cifar10(cifar, train=False)
    for nothing in (meta([]), b"\xff\n", b"a\x00b\n"):
        (cifar / "batches.meta.txt").write_bytes(nothing)
        with refused("batches.meta.txt cannot be read"):
            Cifar10(cifar)
    (cifar / "batches.meta.txt").unlink()
    with refused("batches.meta.txt does not exist"):
        Cifar10(cifar)


def test_python_version_of_cifar_is_refused_with_advice(tmp_path: Path) -> None:
    for name in ("batches.meta", "data_batch_1", "test_batch"):
        (tmp_path / name).write_bytes(b"\x80\x02}.")
    with refused(
        rf"{tmp_path} has the Python version of CIFAR-10 \(batches.meta\).*download the binary version, "
        r"https://.*/cifar-10-binary.tar.gz, and give its path"
    ):
        Cifar10(tmp_path)


def packed_archive(folder: Path, files: dict[str, bytes]) -> Path:
    """An archive as it is published: the files are in a folder."""
    path = folder / "cifar-10-binary.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


def test_cifar_is_read_from_its_archive(cifar: Path) -> None:
    files = {path.name: path.read_bytes() for path in sorted(cifar.iterdir(), reverse=True)}
    path = packed_archive(cifar, {"readme.html": b"<html>", **files})
    for train in (True, False):
        unpacked, read = Cifar10(cifar, train=train), Cifar10(path, train=train)
        assert (read.classes, len(read)) == (unpacked.classes, len(unpacked))
        for ours, theirs in zip(read.batch(np.arange(len(read))), unpacked.batch(np.arange(len(read))), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_archive_that_is_missing_damaged_or_another_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cifar-10-binary.tar.gz"
    with refused(rf"no file or folder at {path}; download https://\S+/cifar-10-binary.tar.gz and save it there"):
        Cifar10(path)
    batch = binary(CIFAR, [0, 1, 2, 0])
    packed_archive(tmp_path, {"batches.meta.txt": meta(), "test_batch.bin": batch[:-9]})
    with refused(rf"test_batch.bin in {path} has 12,283 bytes.*download the archive again"):
        Cifar10(path, train=False)
    with refused(rf"{path} has no file data_batch_1.bin, so it is not the archive .*; download https"):
        Cifar10(path)
    packed_archive(tmp_path, {"data_batch_4": b"\x80", "batches.meta": b"\x80\x02}."})
    with refused(rf"{path} has the Python version of CIFAR-10"):
        Cifar10(path)
    packed_archive(tmp_path, {"batches.meta.txt": meta(), "test_batch.bin": bytes(65 << 20)})
    with refused(rf"{path} cannot be read: it has more than 67,108,864 bytes"):
        Cifar10(path, train=False)
    whole = packed_archive(tmp_path, {"batches.meta.txt": meta(), "test_batch.bin": batch}).read_bytes()
    for content in (
        whole[: len(whole) // 2],
        b"\x1f\x8b" + bytes(50),
        b"no archive",
        b"",
        gzip.compress(b"no tar" * 200),
    ):
        path.write_bytes(content)
        with refused(rf"{path} (cannot be read|has no file)"):
            Cifar10(path, train=False)


# Folders.


def save(path: Path, color: tuple[int, int, int], size: tuple[int, int] = (6, 4), **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path / "cat/b.png", (10, 20, 30))
    save(tmp_path / "cat/a.PNG", (40, 50, 60), size=(3, 9))
    save(tmp_path / "ant/deep/er.bmp", (70, 80, 90))
    save(tmp_path / "ant/z.jpg", (100, 100, 100), quality=100)
    save(tmp_path / ".hidden/x.png", (0, 0, 0))
    (tmp_path / "cat/notes.txt").write_text("no image")
    return tmp_path


def test_a_folder_s_classes_and_images_are_in_order(folder: Path) -> None:
    dataset = ImageFolder(folder, size=(5, 8))
    x, y = dataset.batch(np.arange(4))
    assert (dataset.classes, len(dataset), dict(dataset.unreadable)) == (("ant", "cat"), 4, {})
    assert (x.shape, x.dtype, y.tolist()) == ((4, 5, 8, 3), np.dtype(np.uint8), [0, 0, 1, 1])
    assert [image[2, 3].tolist() for image in x] == [[70, 80, 90], [100] * 3, [40, 50, 60], [10, 20, 30]]


def test_images_are_converted_to_grey(folder: Path) -> None:
    Image.new("RGBA", (4, 4), (200, 200, 200, 0)).save(folder / "cat/c.png")
    x, _ = ImageFolder(folder, size=(2, 2), mode="L").batch(np.array([1, 4]))
    assert x.shape == (2, 2, 2, 1)
    assert x[:, 0, 0, 0].tolist() == [100, 200]


def test_images_are_stretched_or_cut(folder: Path) -> None:
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, :2] = wide[:, 6:] = 255
    Image.fromarray(wide).save(folder / "cat/wide.png")
    (stretched,), _ = ImageFolder(folder, size=(4, 4)).batch(np.array([4]))
    (cut,), _ = ImageFolder(folder, size=(4, 4), crop=True).batch(np.array([4]))
    assert stretched[0, 0, 0] > 200
    assert not cut.any()


def test_unreadable_images_are_counted_and_named(folder: Path) -> None:
    (folder / "cat/empty.png").touch()
    (folder / "ant/text.jpg").write_text("no image")
    with refused(
        r"2 of 6 images in .* cannot be read: .*ant/text.jpg \(cannot identify.*cat/empty.png .*skip_unreadable"
    ):
        ImageFolder(folder, size=(4, 4))
    dataset = ImageFolder(folder, size=(4, 4), skip_unreadable=True)
    assert len(dataset) == 6
    assert sorted(os.path.basename(path) for path in dataset.unreadable) == ["empty.png", "text.jpg"]
    x, y = dataset.batch(np.array([1, 1, 0, 5, 4, 2]))  # 1 and 5 are unreadable
    assert y.tolist() == [0, 0, 0, 0, 1, 0]
    assert x[:, 0, 0, 0].tolist() == [70, 70, 70, 70, 10, 100]
    with refused("2 of 6 images .*; repair or remove them$"):
        dataset.batch(np.array([1, 5]))


def test_truncated_image_raises_an_error_when_it_is_read(folder: Path) -> None:
    path = folder / "cat/cut.png"
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:5000])
    dataset = ImageFolder(folder, size=(4, 4))
    with refused(r"1 of 5 images .*cut.png \("):
        dataset.batch(np.array([0, 3, 4]))
    dataset = ImageFolder(folder, size=(4, 4), skip_unreadable=True)
    assert dataset.batch(np.array([0, 3, 4]))[1].tolist() == [0, 1, 1]
    assert list(dataset.unreadable) == [str(folder / "cat/cut.png")]


def test_images_of_too_many_pixels_are_not_decoded(folder: Path) -> None:
    save(folder / "cat/big.png", (1, 2, 3), size=(100, 100))
    with refused(r"big.png \(100 x 100 are 10,000 pixels, but max_pixels is 9,999\)"):
        ImageFolder(folder, size=(4, 4), max_pixels=9_999)
    assert len(ImageFolder(folder, size=(4, 4), max_pixels=10_000)) == 5


def test_image_beyond_pillows_limit_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with refused("4 of 4 images"):
        ImageFolder(folder, size=(4, 4))


def test_formats_that_are_programs_are_not_tried(folder: Path) -> None:
    Image.new("RGB", (4, 4)).save(folder / "cat/eps.png", format="EPS")
    with refused(r"1 of 5 images .*eps.png \(cannot identify image file"):
        ImageFolder(folder, size=(4, 4))


def test_image_that_disappears_raises_an_error(folder: Path) -> None:
    dataset = ImageFolder(folder, size=(4, 4), skip_unreadable=True)
    (folder / "ant/z.jpg").unlink()
    with refused("z.jpg does not exist"):
        dataset.batch(np.array([0, 1]))
    assert not dataset.unreadable


def test_folder_without_images_and_invalid_arguments_are_refused(tmp_path: Path, folder: Path) -> None:
    with refused("none does not exist"):
        ImageFolder(folder / "none", size=(4, 4))
    with refused("contains no folders"):
        ImageFolder(folder / "cat", size=(4, 4))
    for wrong in ({"size": (0, 4)}, {"size": (4, 4), "mode": "CMYK"}, {"size": (4, 4), "max_pixels": 0}):
        with refused("give"):
            ImageFolder(folder, **wrong)
    (folder / "dog").mkdir()
    with refused("dog contains no images"):
        ImageFolder(folder, size=(4, 4))


# Reading ahead.


def readers() -> list[Any]:
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_reading_ahead_gives_the_same_batches(folder: Path) -> None:
    def epoch(prefetch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        leases = iter([Lease(1, DataRange(epoch=0, start=0, stop=4))])
        batches = LeasedBatches(
            ImageFolder(folder, size=(4, 4), prefetch=prefetch), 3, 5, lambda _: next(leases, NoRange.FINISHED)
        )
        batches.lease()
        taken = [batches.take().data for _ in range(2)]
        batches.close()
        return taken

    for (x, y), (ahead_x, ahead_y) in zip(epoch(0), epoch(2), strict=True):
        np.testing.assert_array_equal(x, ahead_x)
        np.testing.assert_array_equal(y, ahead_y)
    waiting.wait_until(lambda: not readers(), what="the end of all threads that read")
