"""Files of tensors: they are compatible with safetensors, and every kind of damage is found before values are used."""

import json
import math
import os
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import save_file

from shoal import errors
from shoal._checkpoint import local_storage, manifest, tensor_files
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import FileEntry, sum_of
from shoal._checkpoint.tensor_files import TensorReader, open_tensors, write_tensors
from shoal._checkpoint.tensors import decode_header, encode_header

DTYPES = [np.float32, np.float64, np.int64, np.float16, np.uint8, np.bool_]

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
arrays = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(DTYPES), shapes),
    max_size=6,
)


def filled(drawn: dict[str, tuple[Any, tuple[int, ...]]]) -> dict[str, np.ndarray]:
    return {name: np.arange(math.prod(shape)).astype(dtype).reshape(shape) for name, (dtype, shape) in drawn.items()}


def write(root: Path, tensors: dict[str, np.ndarray], *, piece: int = 1 << 30) -> FileEntry:
    data = (array.reshape(-1).view(np.uint8).data for array in tensors.values())
    pieces = (part[start : start + piece] for part in data for start in range(0, len(part), piece))
    names = [(name, array.dtype, array.shape) for name, array in tensors.items()]
    return write_tensors(LocalStorage(root), ["f.safetensors"], names, pieces, {"job": "digits"})


def read(root: Path, entry: FileEntry) -> dict[str, np.ndarray]:
    with open_tensors(LocalStorage(root), ["f.safetensors"], entry) as reader:
        found = {}
        for name, tensor in reader.contents.tensors.items():
            target = np.empty(math.prod(tensor.shape), tensor.dtype)
            reader.fill([reader.place(name, target)])
            found[name] = target.reshape(tensor.shape)
        return found


def same(some: dict[str, np.ndarray], others: dict[str, np.ndarray]) -> bool:
    return some.keys() == others.keys() and all(
        some[name].dtype == others[name].dtype
        and some[name].shape == others[name].shape
        and some[name].tobytes() == others[name].tobytes()
        for name in some
    )


@given(drawn=arrays, block=st.integers(1, 300), piece=st.integers(1, 200))
def test_written_tensors_are_read_unchanged(tmp_path_factory: Any, drawn: Any, block: int, piece: int) -> None:
    root, tensors = tmp_path_factory.mktemp("files"), filled(drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "BLOCK_BYTES", block)
        patch.setattr(manifest, "BLOCK_BYTES", block)
        entry = write(root, tensors, piece=piece)
        assert len(entry.sums) == math.ceil(entry.nbytes / block)
        assert same(read(root, entry), tensors)
    with safe_open(root / "f.safetensors", "np") as library:
        assert same({name: library.get_tensor(name) for name in library.keys()}, tensors)  # noqa: SIM118
        assert library.metadata() == {"job": "digits"}


@given(drawn=arrays)
def test_files_of_the_library_are_read(tmp_path_factory: Any, drawn: Any) -> None:
    root, tensors = tmp_path_factory.mktemp("files"), filled(drawn)
    save_file(tensors, root / "f.safetensors", {"by": "the library"})
    text = (root / "f.safetensors").read_bytes()
    assert same(read(root, FileEntry("f.safetensors", len(text), (sum_of(text),))), tensors)


def test_bfloat16_is_read_by_the_library(tmp_path: Path) -> None:
    write(tmp_path, {"b": np.arange(6).astype(ml_dtypes.bfloat16)})
    torch_view = (tmp_path / "f.safetensors").read_bytes()
    assert b'"dtype":"BF16"' in torch_view
    assert np.frombuffer(torch_view[-12:], ml_dtypes.bfloat16).tolist() == [0, 1, 2, 3, 4, 5]


@given(cuts=st.lists(st.integers(0, 4_000), max_size=30), wanted=st.randoms(), order=st.randoms())
def test_any_pieces_are_filled_with_the_bytes_of_the_file(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], wanted: random.Random, order: random.Random
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "BLOCK_BYTES", 512)
        patch.setattr(manifest, "BLOCK_BYTES", 512)
        patch.setattr(local_storage, "MAX_TARGETS", 3)
        root = tmp_path_factory.mktemp("pieces")
        entry = write(root, {"x": np.random.default_rng(1).integers(0, 256, 4_000).astype(np.int64)})
        data = (root / "f.safetensors").read_bytes()
        ends = [*sorted(cuts), len(data)]
        pieces = [
            (start, memoryview(bytearray(stop - start)))
            for start, stop in pairwise([0, *ends])
            if wanted.random() < 0.7
        ]
        order.shuffle(pieces)
        with open_tensors(LocalStorage(root), ["f.safetensors"], entry) as reader:
            reader.fill(pieces)
    for start, filled in pieces:
        assert filled == data[start : start + len(filled)]


def test_a_part_of_a_tensor_reads_no_more_than_its_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "BLOCK_BYTES", 1 << 10)
    monkeypatch.setattr(manifest, "BLOCK_BYTES", 1 << 10)
    x = np.arange(10_000, dtype=np.float32)
    entry = write(tmp_path, {"x": x})
    with LocalStorage(tmp_path).open(["f.safetensors"]) as file:
        reader = TensorReader(file, entry, "f.safetensors")
        counted: list[int] = []
        read_into = file.read_into

        def count_and_read(start: int, targets: Sequence[memoryview]) -> None:
            counted.append(sum(map(len, targets)))
            read_into(start, targets)

        monkeypatch.setattr(file, "read_into", count_and_read)
        part = np.empty(700, np.float32)
        reader.fill([reader.place("x", part, 5_001)])
        assert np.array_equal(part, x[5_001:5_701])
        assert sum(counted) <= 4 << 10
        for target, first in ((np.empty(2, np.float32), 9_999), (np.empty(2, np.float64), 0)):
            with pytest.raises(ValueError, match="does not have 2 elements of float"):
                reader.fill([reader.place("x", target, first)])
        with pytest.raises(KeyError):
            reader.fill([reader.place("y", part)])


def verified(root: Path, entry: FileEntry) -> None:
    with open_tensors(LocalStorage(root), ["f.safetensors"], entry) as reader:
        reader.verify()


def test_a_file_cut_short_anywhere_or_longer_is_damaged(tmp_path: Path) -> None:
    entry = write(tmp_path, {"x": np.arange(5000, dtype=np.float32)})
    text = (tmp_path / "f.safetensors").read_bytes()
    for size in (*range(0, len(text), 997), len(text) - 1):
        (tmp_path / "f.safetensors").write_bytes(text[:size])
        with pytest.raises(errors.CorruptCheckpoint):
            verified(tmp_path, entry)
    (tmp_path / "f.safetensors").write_bytes(text + b"\0")
    with pytest.raises(errors.CorruptCheckpoint, match="bytes"):
        verified(tmp_path, entry)
    (tmp_path / "f.safetensors").unlink()
    with pytest.raises(errors.CorruptCheckpoint, match="missing"):
        verified(tmp_path, entry)


@given(bit=st.floats(0, 1, exclude_max=True))
def test_a_bit_that_is_another_is_found(tmp_path_factory: Any, bit: float) -> None:
    root = tmp_path_factory.mktemp("files")
    entry = write(root, {"x": np.arange(3000, dtype=np.float32), "y": np.ones(7)})
    text = bytearray((root / "f.safetensors").read_bytes())
    at = int(bit * len(text) * 8)
    text[at // 8] ^= 1 << (at % 8)
    (root / "f.safetensors").write_bytes(text)
    with pytest.raises(errors.CorruptCheckpoint):
        verified(root, entry)


def test_a_file_that_shrinks_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    entry = write(tmp_path, {"x": np.arange(3000, dtype=np.float32)})
    with open_tensors(LocalStorage(tmp_path), ["f.safetensors"], entry) as reader:
        os.truncate(tmp_path / "f.safetensors", 100)
        with pytest.raises(errors.CorruptCheckpoint, match="truncated"):
            reader.verify()


def header_of(entries: Any, *, raw: bytes | None = None) -> bytes:
    text = raw if raw is not None else json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def float32(shape: Sequence[int], start: int, stop: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (header_of([]), 0),
        (header_of(None, raw=b"{"), 0),
        (header_of(None, raw=b"\xff\xfe"), 0),
        (header_of(None, raw=b"[" * 100_000), 0),
        (header_of({"x": 5}), 0),
        (header_of({"x": {"dtype": "F32"}}), 0),
        (header_of({"x": float32([2], 0, 8, "F33")}), 8),
        (header_of({"x": float32([2], 0, 4)}), 4),
        (header_of({"x": float32([-2], 0, -8)}), 0),
        (header_of({"x": float32([2.0], 0, 8)}), 8),  # type: ignore[list-item]
        (header_of({"x": float32([True], 0, 4)}), 4),
        (header_of({"x": float32([2], 0, 8)}), 9),
        (header_of({"x": float32([2], 0, 8)}), 7),
        (header_of({"x": float32([2], 4, 12)}), 12),
        (header_of({"x": float32([2], 0, 8), "y": float32([2], 4, 12)}), 12),
        (header_of({"x": float32([2], 0, 8), "y": float32([2], 12, 20)}), 20),
        (header_of(None, raw=b'{"x":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"x":{}}'), 1),
        (header_of({"__metadata__": {"a": 1}}), 0),
        (header_of({"__metadata__": "a"}), 0),
        (b"\xff" * 7 + b"\x7f", 10),
        ((200_000_000).to_bytes(8, "little"), 100),
        (b"\1\2", 0),
        (b"", 0),
    ],
)
def test_a_header_that_lies_is_refused(tmp_path: Path, header: bytes, data: int) -> None:
    text = header + bytes(data)
    (tmp_path / "f.safetensors").write_bytes(text)
    entry = FileEntry("f.safetensors", len(text), (sum_of(text),) if text else ())
    with pytest.raises(errors.CorruptCheckpoint):
        verified(tmp_path, entry)


def test_a_header_is_padded_so_that_data_is_aligned() -> None:
    for length in range(70):
        header = encode_header([("x" * length, np.dtype(np.uint8), (1,))])
        assert len(header) % 64 == 0
        assert decode_header(header, len(header) + 1, "f").tensors["x" * length].start == len(header)


def test_duplicate_names_are_refused() -> None:
    for names in (["x", "x"], ["__metadata__"]):
        with pytest.raises(ValueError, match="twice"):
            encode_header([(name, np.dtype(np.uint8), ()) for name in names], {"a": "b"})


def test_an_entry_of_another_file_is_refused(tmp_path: Path) -> None:
    entry = write(tmp_path, {"x": np.ones(3, np.float32)})
    with LocalStorage(tmp_path).open(["f.safetensors"]) as file, pytest.raises(errors.CorruptCheckpoint):
        TensorReader(file, FileEntry("f", entry.nbytes, (*entry.sums, "0")), "f")
