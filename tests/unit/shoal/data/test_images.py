"""Image data sets: idx files, CIFAR-10 and folders; what they give, and what users hear when files are bad."""

import gzip
import os
import struct
import threading
from contextlib import suppress

import numpy as np
import pytest
from PIL import Image

import shoal
from shoal import errors
from shoal._training.participant import DataRange, NoRange
from shoal.data import Cifar10, Idx, ImageFolder
from shoal_worker.batches import LeasedBatches
from support import waiting

RNG = np.random.default_rng(0)
IMAGES = RNG.integers(0, 256, (7, 5, 4), np.uint8)
LABELS = RNG.integers(0, 10, 7, np.uint8)
CODES = {"u1": 8, "i1": 9, ">i2": 11, ">i4": 12, ">f4": 13, ">f8": 14}


def refused(said):
    return pytest.raises(errors.InvalidData, match=said)


def idx(array, kind="u1"):
    return (
        bytes([0, 0, CODES[kind], array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.astype(kind).tobytes()
    )


def write(path, content, *, packed):
    path.write_bytes(gzip.compress(content) if packed else content)
    return path


@pytest.fixture(params=[False, True], ids=["plain", "gzip"])
def packed(request):
    return request.param


# idx.


@pytest.fixture
def labels(tmp_path):
    return write(tmp_path / "labels", idx(LABELS), packed=False)


def test_idx_gives_images_with_channels_and_labels(tmp_path, labels, packed):
    dataset = Idx(write(tmp_path / "images", idx(IMAGES), packed=packed), str(labels))
    assert isinstance(dataset, shoal.Dataset)
    x, y = dataset.batch(np.array([6, 0, 3]))
    assert (len(dataset), x.dtype, y.dtype) == (7, np.uint8, np.int64)
    np.testing.assert_array_equal(x, IMAGES[[6, 0, 3], ..., np.newaxis])
    np.testing.assert_array_equal(y, LABELS[[6, 0, 3]])


@pytest.mark.parametrize("kind", CODES)
def test_idx_of_every_type_comes_in_the_machine_s_byte_order(tmp_path, kind, packed):
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
        (b"\x89PNG....", "begins with the bytes 89 50 4e 47, which no idx file does"),
        (b"\0\0\x0a\3" + bytes(20), "begins with the bytes 00 00 0a 03"),
        (b"\0\0\x08\0", "begins with the bytes 00 00 08 00"),
        (idx(IMAGES)[:9], "ends within its header; it was cut short"),
        (idx(IMAGES)[:-1], "7 x 5 x 4 numbers of 1 bytes, 140 in all, and it holds 139"),
        (idx(IMAGES) + b"!", "140 in all, and it holds (141|more)"),
        (idx(IMAGES[:0]), r"has the dimensions \(0, 5, 4\), and so no numbers"),
        (idx(IMAGES[0]), r"has the dimensions \(5, 4\); images are \[n, height, width\]"),
        (idx(IMAGES[:3]), "has 3 images, and .* 7 labels"),
        (b"\0\0\x0e\xff" + b"\xff" * 1020, "says that it holds .* in all, and"),
    ],
)
def test_idx_that_is_no_idx_is_cut_or_too_long(tmp_path, labels, content, said, packed):
    with refused(rf"images.*{said}"):
        Idx(write(tmp_path / "images", content, packed=packed), labels)


def test_idx_whose_labels_are_none(tmp_path, labels):
    with refused("labels are whole numbers in one dimension"):
        Idx(write(tmp_path / "x", idx(IMAGES), packed=False), write(tmp_path / "y", idx(IMAGES), packed=False))
    with refused("labels are whole numbers in one dimension"):
        Idx(tmp_path / "x", write(tmp_path / "y", idx(LABELS, ">f4"), packed=False))


def test_idx_that_is_not_there_or_empty_or_far(tmp_path, labels):
    with refused("none is not there"):
        Idx(tmp_path / "none", labels)
    with refused("empty is empty"):
        Idx(write(tmp_path / "empty", b"", packed=False), labels)
    with refused("cannot be mapped"):
        Idx("s3://bucket/images", labels)


def test_gzip_that_is_cut_or_damaged(tmp_path, labels):
    content = gzip.compress(idx(IMAGES))
    (tmp_path / "images").write_bytes(content[:-20])
    with refused("images (cannot be read|says)"):
        Idx(tmp_path / "images", labels)
    (tmp_path / "images").write_bytes(content[:-8] + b"\0\0\0\0" + content[-4:])
    with refused("images cannot be read: CRC"):
        Idx(tmp_path / "images", labels)


def test_gzip_is_not_unpacked_beyond_what_is_allowed(tmp_path, labels):
    with refused("140 in all, and max_bytes is 100: raise it"):
        Idx(write(tmp_path / "images", idx(IMAGES), packed=True), labels, max_bytes=100)
    huge = bytes([0, 0, 8, 3]) + struct.pack(">3I", 1 << 10, 1 << 10, 1 << 10)
    with refused("so short a file cannot: it is damaged"):
        Idx(write(tmp_path / "images", huge, packed=True), labels)


# CIFAR-10.

CIFAR = RNG.integers(0, 256, (4, 3072), np.uint8)
CLASSES = ["airplane", "automobile", "bird"]


class Python2:
    """Writes as Python 2's cPickle did by protocol 2: what it keeps for later use is numbered from 1, and lists and
    dicts are filled by 1,000 items at a time.
    """

    def __init__(self):
        self.kept = 0

    def file(self, value):
        return b"\x80\x02" + self.value(value) + b"."

    def value(self, value):
        match value:
            case dict():
                pairs = [self.keep(b"}")]
                pairs += self.batches([key_or_item for pair in value.items() for key_or_item in pair], 2000, b"u", b"s")
                return b"".join(pairs)
            case list():
                return b"".join([self.keep(b"]"), *self.batches(value, 1000, b"e", b"a")])
            case bytes() if len(value) < 256:
                return self.keep(b"U" + bytes([len(value)]) + value)
            case bytes():
                return self.keep(b"T" + struct.pack("<i", len(value)) + value)
            case np.ndarray():
                return self.array(value)
        forms = [(0, 256, b"K", "B"), (256, 1 << 16, b"M", "<H"), (-(1 << 31), 1 << 31, b"J", "<i")]
        code, form = next((code, form) for low, high, code, form in forms if low <= value < high)
        return code + struct.pack(form, value)

    def keep(self, written):
        self.kept += 1
        return written + (b"q" + bytes([self.kept]) if self.kept < 256 else b"r" + struct.pack("<I", self.kept))

    def batches(self, items, size, many, one):
        for start in range(0, len(items), size):
            part = items[start : start + size]
            alone = len(part) == size // 1000
            yield b"" if alone else b"("
            yield from map(self.value, part)
            yield one if alone else many

    def array(self, array):
        """As NumPy told it of an array: how to make an empty one, and its state."""
        by_columns = array.flags.f_contiguous and not array.flags.c_contiguous
        parts = [self.keep(b"cnumpy.core.multiarray\n_reconstruct\n"), self.keep(b"cnumpy\nndarray\n")]
        parts += [self.keep(b"K\0\x85"), self.value(b"b"), self.keep(b"\x87"), self.keep(b"R"), b"(K\1"]
        parts += [self.value(array.shape[0]), self.value(array.shape[1]), self.keep(b"\x86")]
        parts += [self.keep(b"cnumpy\ndtype\n"), self.value(b"u1"), self.keep(b"K\0K\1\x87"), self.keep(b"R")]
        parts += [b"(K\3", self.value(b"|"), b"NNN", 2 * (b"J" + b"\xff" * 4), self.keep(b"K\0t"), b"b"]
        parts += [b"\x88" if by_columns else b"\x89", self.value(array.tobytes("A")), self.keep(b"t"), b"b"]
        return b"".join(parts)


def python2(images, labels):
    """A batch as it is published."""
    names = [b"leptodactylus_pentadactylus_s_%06d.png" % number for number in range(len(images))]
    held = {b"batch_label": b"training batch 1 of 5", b"labels": labels, b"data": images, b"filenames": names}
    return Python2().file(held)


def meta(names=CLASSES):
    names = [name.encode() for name in names]
    return Python2().file({b"num_cases_per_batch": 10_000, b"label_names": names, b"num_vis": 3072})


@pytest.fixture
def cifar(tmp_path):
    (tmp_path / "batches.meta").write_bytes(meta())
    for number in range(1, 6):
        (tmp_path / f"data_batch_{number}").write_bytes(python2(CIFAR + number, [0, 1, 2, number % 3]))
    (tmp_path / "test_batch").write_bytes(python2(CIFAR, [2, 1, 0, 2]))
    return tmp_path


def test_cifar_of_more_images_than_are_written_at_a_time(cifar):
    images = RNG.integers(0, 256, (1001, 3072), np.uint8)
    labels = RNG.integers(0, 3, 1001).tolist()
    (cifar / "test_batch").write_bytes(python2(images, labels))
    x, y = Cifar10(cifar, train=False).batch(np.arange(1001))
    np.testing.assert_array_equal(x, images.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    assert y.tolist() == labels


def test_cifar_as_it_is_published(cifar):
    train, test = Cifar10(cifar), Cifar10(str(cifar), train=False)
    assert (len(train), len(test), train.classes) == (20, 4, tuple(CLASSES))
    x, y = train.batch(np.array([19, 0]))
    np.testing.assert_array_equal(x[0], (CIFAR[3] + 5).reshape(3, 32, 32).transpose(1, 2, 0))
    np.testing.assert_array_equal(x[1], (CIFAR[0] + 1).reshape(3, 32, 32).transpose(1, 2, 0))
    assert (x.dtype, y.dtype, y.tolist()) == (np.uint8, np.int64, [2, 0])
    assert test.batch(np.arange(4))[1].tolist() == [2, 1, 0, 2]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (python2(CIFAR, [0, 1, 2, 0])[:-9], "at byte .* bytes more are to follow"),
        (python2(CIFAR, [0, 1, 2, 3]), "'labels' has one that is no whole number from 0 to 2"),
    ],
)
def test_cifar_that_is_damaged_or_something_else(cifar, content, said):
    (cifar / "test_batch").write_bytes(content)
    with refused(rf"test_batch.*{said}"):
        Cifar10(cifar, train=False)


def test_cifar_with_any_bytes_changed_is_read_or_refused(cifar):
    content = python2(CIFAR[:1], [1])
    for place in [*range(280), *range(len(content) - 120, len(content))]:
        for byte in (0, 40, 98, 255):
            (cifar / "test_batch").write_bytes(content[:place] + bytes([byte]) + content[place + 1 :])
            with suppress(errors.InvalidData):
                Cifar10(cifar, train=False)


def test_cifar_files_that_are_not_there_too_large_or_without_classes(cifar):
    (cifar / "data_batch_3").unlink()
    with refused("data_batch_3 is not there"):
        Cifar10(cifar)
    os.truncate(cifar / "test_batch", 1 << 30)
    with refused("test_batch cannot be read: it has more than 67,108,864 bytes"):
        Cifar10(cifar, train=False)
    (cifar / "batches.meta").write_bytes(meta([]))
    with refused("batches.meta.*'label_names' is no list of texts"):
        Cifar10(cifar)


# Folders.


def save(path, color, size=(6, 4), **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, color).save(path, **options)


@pytest.fixture
def folder(tmp_path):
    save(tmp_path / "cat/b.png", (10, 20, 30))
    save(tmp_path / "cat/a.PNG", (40, 50, 60), size=(3, 9))
    save(tmp_path / "ant/deep/er.bmp", (70, 80, 90))
    save(tmp_path / "ant/z.jpg", (100, 100, 100), quality=100)
    save(tmp_path / ".hidden/x.png", (0, 0, 0))
    (tmp_path / "cat/notes.txt").write_text("no image")
    return tmp_path


def test_a_folder_s_classes_and_images_are_in_order(folder):
    dataset = ImageFolder(folder, size=(5, 8))
    x, y = dataset.batch(np.arange(4))
    assert (dataset.classes, len(dataset), dict(dataset.unreadable)) == (("ant", "cat"), 4, {})
    assert (x.shape, x.dtype, y.tolist()) == ((4, 5, 8, 3), np.uint8, [0, 0, 1, 1])
    assert [image[2, 3].tolist() for image in x] == [[70, 80, 90], [100] * 3, [40, 50, 60], [10, 20, 30]]


def test_images_are_converted_to_grey(folder):
    Image.new("RGBA", (4, 4), (200, 200, 200, 0)).save(folder / "cat/c.png")
    x, _ = ImageFolder(folder, size=(2, 2), mode="L").batch(np.array([1, 4]))
    assert x.shape == (2, 2, 2, 1)
    assert x[:, 0, 0, 0].tolist() == [100, 200]


def test_images_are_stretched_or_cut(folder):
    wide = np.zeros((4, 8, 3), np.uint8)
    wide[:, :2] = wide[:, 6:] = 255
    Image.fromarray(wide).save(folder / "cat/wide.png")
    (stretched,), _ = ImageFolder(folder, size=(4, 4)).batch(np.array([4]))
    (cut,), _ = ImageFolder(folder, size=(4, 4), crop=True).batch(np.array([4]))
    assert stretched[0, 0, 0] > 200
    assert not cut.any()


def test_unreadable_images_are_counted_and_named(folder):
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
    with refused("2 of 6 images .*; mend or remove them$"):
        dataset.batch(np.array([1, 5]))


def test_an_image_that_is_cut_behind_its_header_shows_when_it_is_wanted(folder):
    path = folder / "cat/cut.png"
    Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8)).save(path)
    path.write_bytes(path.read_bytes()[:5000])
    dataset = ImageFolder(folder, size=(4, 4))
    with refused(r"1 of 5 images .*cut.png \("):
        dataset.batch(np.array([0, 3, 4]))
    dataset = ImageFolder(folder, size=(4, 4), skip_unreadable=True)
    assert dataset.batch(np.array([0, 3, 4]))[1].tolist() == [0, 1, 1]
    assert list(dataset.unreadable) == [str(folder / "cat/cut.png")]


def test_images_of_too_many_pixels_are_not_decoded(folder):
    save(folder / "cat/big.png", (1, 2, 3), size=(100, 100))
    with refused(r"big.png \(100 x 100 are 10,000 pixels, and max_pixels is 9,999\)"):
        ImageFolder(folder, size=(4, 4), max_pixels=9_999)
    assert len(ImageFolder(folder, size=(4, 4), max_pixels=10_000)) == 5


def test_a_bomb_of_pillow_s_own_limit(folder, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    with refused("4 of 4 images"):
        ImageFolder(folder, size=(4, 4))


def test_formats_that_are_programs_are_not_tried(folder):
    Image.new("RGB", (4, 4)).save(folder / "cat/eps.png", format="EPS")
    with refused(r"1 of 5 images .*eps.png \(cannot identify image file"):
        ImageFolder(folder, size=(4, 4))


def test_an_image_that_goes_is_an_error_in_any_case(folder):
    dataset = ImageFolder(folder, size=(4, 4), skip_unreadable=True)
    (folder / "ant/z.jpg").unlink()
    with refused("z.jpg is not there"):
        dataset.batch(np.array([0, 1]))
    assert not dataset.unreadable


def test_folders_without_images_and_arguments_without_sense(tmp_path, folder):
    with refused("none is not there"):
        ImageFolder(folder / "none", size=(4, 4))
    with refused("has no folders in it"):
        ImageFolder(folder / "cat", size=(4, 4))
    for wrong in ({"size": (0, 4)}, {"size": (4, 4), "mode": "CMYK"}, {"size": (4, 4), "max_pixels": 0}):
        with refused("give"):
            ImageFolder(folder, **wrong)
    (folder / "dog").mkdir()
    with refused("dog has no images in it"):
        ImageFolder(folder, size=(4, 4))


# Reading ahead.


def readers():
    return [thread for thread in threading.enumerate() if thread.name == "read-ahead"]


def test_what_is_read_ahead_is_what_is_read_in_turn(folder):
    def epoch(prefetch):
        leases = iter([DataRange(lease=1, epoch=0, start=0, stop=4)])
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
