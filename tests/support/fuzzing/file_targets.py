"""Fuzz targets of files: checkpoints, safetensors, and the sources of data."""

import contextlib
import gzip
import io
import json
import random
import re
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from shoal import data as sources
from shoal import errors, optim
from shoal._checkpoint import Manifest
from shoal._checkpoint.imports import state_pieces
from shoal._checkpoint.manifest import sum_of
from shoal._checkpoint.tensors import decode_entry, decode_header, encode_header, header_bytes
from shoal.checkpoints import Checkpoints
from shoal_nn.models.weights.files import read_arrays
from support.fuzzing.campaign import SimpleTarget, Target
from support.fuzzing.mutator import mutated

JOB = "job"


def signed(text: bytes) -> bytes:
    """Returns a manifest with a right checksum, as somebody who can write to the storage can make it."""
    body = re.sub(rb',\n "sum": "[^"]*"\n}\n\Z', b"", text)
    return body + f',\n "sum": "{sum_of(body)}"\n}}\n'.encode()


class Files:
    """A decoder of files, which finds each input as a file in a folder of its own.

    Args:
        name: name of the target.
        seeds: returns the contents of valid files.
        read: reads the file at a path.
        prepare: changes each input.
        allowed: documented errors beside ShoalError.
    """

    def __init__(
        self,
        name: str,
        seeds: Callable[[], list[bytes]],
        read: Callable[[Path], object],
        prepare: Callable[[bytes], bytes] = bytes,
        allowed: tuple[type[Exception], ...] = (),
    ) -> None:
        self.name, self.allowed = name, allowed
        self._make, self._read, self._prepare = seeds, read, prepare

    def start(self) -> None:
        warnings.simplefilter("ignore")
        # In memory: a disk would be most of the time.
        self._folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self._path = Path(self._folder.name) / "file"
        self._seeds = self._make()
        for seed in self._seeds:
            self.run(seed)

    def draw(self, draw: random.Random) -> bytes:
        return mutated(draw, self._seeds)

    def run(self, data: bytes) -> None:
        self._path.unlink(missing_ok=True)  # a new file: an earlier one may be mapped
        self._path.write_bytes(self._prepare(data))
        self._read(self._path)

    def stop(self) -> None:
        self._folder.cleanup()


def _all(dataset: "sources.Idx | sources.Arrays | sources.Csv | sources.Parquet") -> None:
    """Reads the first samples, and the last."""
    count = len(dataset)
    dataset.batch(np.unique(np.array([0, count // 2, count - 1])))


def _read_blocks(dataset: "sources.Csv | sources.Parquet") -> None:
    for _ in dataset.read_blocks(0, min(4, len(dataset.blocks.starts) - 1)):
        pass


def idx_bytes(shape: tuple[int, ...], code: int = 0x08, payload: bytes | None = None) -> bytes:
    """Returns an idx file."""
    head = bytes([0, 0, code, len(shape)]) + b"".join(size.to_bytes(4, "big") for size in shape)
    return head + (bytes(int(np.prod(shape))) if payload is None else payload)


def _idx_seeds() -> list[bytes]:
    plain = [idx_bytes((3, 2, 2)), idx_bytes((3,)), idx_bytes((2, 3), 0x0D, bytes(24))]
    return [*plain, *(gzip.compress(it) for it in plain)]


def _read_idx(path: Path) -> None:
    other = path.with_name("labels")
    if not other.exists():
        other.write_bytes(idx_bytes((3,)))
    for images, labels in ((path, other), (other, path)):
        with contextlib.suppress(errors.InvalidData):
            _all(sources.Idx(images, labels))


def npz_bytes(arrays: "dict[str, Any]") -> bytes:
    out = io.BytesIO()
    np.savez(out, **arrays)
    return out.getvalue()


def _array_seeds() -> list[bytes]:
    small: dict[str, Any] = {"x": np.arange(6.0).reshape(3, 2), "y": np.arange(3)}
    packed, plain = io.BytesIO(), io.BytesIO()
    np.savez_compressed(packed, **small)
    np.save(plain, small["x"])
    odd = io.BytesIO()
    np.save(odd, np.zeros(3, [("a", "f4"), ("b", "S3")]))
    lzma = io.BytesIO()
    with zipfile.ZipFile(lzma, "w", zipfile.ZIP_LZMA) as archive:
        archive.writestr("x.npy", plain.getvalue())
    return [npz_bytes(small), packed.getvalue(), plain.getvalue(), odd.getvalue(), lzma.getvalue()]


def _parquet_seeds() -> list[bytes]:
    table = pa.table(
        {"x": pa.array([1.0, 2.0, 3.0]), "s": ["a", "b", "c"], "l": pa.array([[1, 2]] * 3, pa.list_(pa.int32(), 2))}
    )
    seeds = []
    for compression in ("none", "snappy", "zstd", "gzip"):
        out = io.BytesIO()
        pyarrow.parquet.write_table(table, out, compression=compression, write_page_checksum=compression == "zstd")
        seeds.append(out.getvalue())
    return seeds


CSV_SEEDS = [b"x,y\n1,2\n3,4\n", b'x,"y z"\r\n1.5,"a ""b"" c"\r\n2,"d\ne"\r\n', b"x;y\n\n1;2\n", "ä,b\n1,2\n".encode()]


def _cifar_seeds() -> list[bytes]:
    """Returns archives of CIFAR-10's binary version, with four test images and without compression."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, content in (("batches.meta.txt", b"cat\ndog\n"), ("test_batch.bin", bytes(4 * 3073))):
            entry = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return [gzip.compress(out.getvalue(), 0), gzip.compress(out.getvalue(), 1)]


def _weight_seeds() -> list[bytes]:
    folder = Path(__file__).parents[2] / "golden" / "weights"
    return [path.read_bytes() for path in sorted(folder.iterdir())]


def _manifest_seeds() -> list[bytes]:
    folder = Path(__file__).parents[2] / "golden"
    return [path.read_bytes() for path in sorted(folder.rglob("manifest.json"))]


def _use_manifest(path: Path) -> None:
    """Uses a manifest as `shoal checkpoints` does: lists, shows and reads the checkpoint."""
    root = path.with_name("checkpoints")
    place = root / JOB / "00000001"
    place.mkdir(parents=True, exist_ok=True)
    text = path.read_bytes()
    (place / "manifest.json").write_bytes(text)
    with contextlib.suppress(errors.ShoalError):
        Manifest.from_bytes(text, "it")
    checkpoints = Checkpoints(root)
    [*checkpoints.list()]
    for use in (checkpoints.show, checkpoints.verify, checkpoints.read):
        with contextlib.suppress(errors.ShoalError):
            use(f"{JOB}/1")


def _renamed(data: bytes) -> bytes:
    """Returns a manifest with a right checksum, of the job and the number by which it is found."""
    text = re.sub(rb'"job": "[a-z-]*",\n "number": [0-9]+', b'"job": "job",\n "number": 1', data, count=1)
    return signed(text)


def _tensor_seeds() -> list[bytes]:
    return [
        encode_header([("a", np.dtype(np.float32), (2, 3)), ("n", np.dtype(np.int64), ())], {"format": "pt"})
        + bytes(32),
        encode_header([("é", np.dtype(np.float16), (1,))]) + bytes(2),
    ]


def _import_tensors(path: Path) -> None:
    checkpoints = Checkpoints(path.with_name("imported"))
    data = path.read_bytes()
    with contextlib.suppress(errors.ShoalError):
        size = header_bytes(data[:8], len(data), "it")
        decode_header(data[:size], len(data), "it")
    found = checkpoints.import_file(path, JOB)
    checkpoints.read(str(found))
    checkpoints.remove(str(found))


def _state_seeds() -> list[bytes]:
    slots = {slot: {"w": np.ones((2, 3), np.float32), "b/0": np.zeros(())} for slot in ("exp_avg", "exp_avg_sq")}
    return [b"".join(state_pieces(optim.OptimizerState(slots, 7)))]


def _import_state(path: Path) -> None:
    checkpoints, values = Checkpoints(path.with_name("imported")), path.with_name("values")
    values.write_bytes(
        encode_header([("w", np.dtype(np.float32), (2, 3)), ("b/0", np.dtype(np.float64), ())]) + bytes(32)
    )
    given: dict[str, Any] = {"optimizer": optim.Adam(0.1), "optimizer_state": path}
    found = str(checkpoints.import_file(values, JOB, **given))
    checkpoints.optimizer_state(found)
    checkpoints.remove(found)


def _read_weights(path: Path) -> None:
    if not path.read_bytes().startswith(b"\x89HDF"):  # h5py's own decoder is in C, and not ours to fuzz
        read_arrays(path)


def _decode_entry(data: bytes) -> None:
    decode_entry(json.loads(json.dumps(data.decode(errors="surrogateescape"))), "it")


def targets() -> list[Target]:
    """Returns the targets of this module."""
    return [
        Files("manifests", _manifest_seeds, _use_manifest, _renamed),
        Files("safetensors", _tensor_seeds, _import_tensors),
        Files("optimizer_states", _state_seeds, _import_state),
        SimpleTarget("tensor_entries", lambda: [b"F32 40,30 value/0/kernel", b"I64  value/0/n"], _decode_entry),
        Files("idx", _idx_seeds, _read_idx),
        Files("npz", _array_seeds, lambda path: _all(sources.Arrays(str(path)))),
        Files("cifar10", _cifar_seeds, lambda path: sources.Cifar10(path, train=False)),
        Files("weights", _weight_seeds, _read_weights),
        Files("parquet", _parquet_seeds, lambda path: _read_blocks(sources.Parquet(str(path)))),
        Files("csv", lambda: CSV_SEEDS, lambda path: _read_blocks(sources.Csv(str(path)))),
    ]
