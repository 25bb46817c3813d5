"""Hostile tensors: whatever a message or a file promises, it is refused at once, without the memory that it names."""

import gc
import gzip
import io
import json
import re
import struct
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from shoal import errors, optim
from shoal._checkpoint.tensors import header_bytes
from shoal._wire import Chunk, Placement, ShardLayout, decode_push, encode_push
from shoal._wire.limits import MAX_MESSAGE_BYTES
from shoal.checkpoints import Checkpoints
from shoal.consistency import Asynchronous
from shoal.data import Arrays, Idx, Parquet
from shoal.v1 import job_pb2, tensor_pb2
from shoal.v1 import parameter_server_pb2 as pb
from shoal.variables import Variable, from_protos
from shoal_coordinator.api.entry import Descriptions
from shoal_server.shards import JobShardConfig, ShardStore
from support.fuzzing.campaign import SimpleTarget, attempt
from support.fuzzing.file_targets import idx_bytes
from support.fuzzing.mutator import varint
from support.fuzzing.targets import chosen
from support.fuzzing.wire_targets import Lanes, frame, placement, stamp

WITHIN_S = 0.1  # of processor time
MOST_MORE = 64 << 20
LONGEST_TEXT = 2_000  # characters

SHAPES = {
    "10 TB": (10 << 40,),
    "10 TB in two dimensions": (1 << 21, 5 << 21),
    "-1 as an unsigned number": (2**64 - 1,),
    "product of 2^64": (2**32, 2**32),
    "product of 2^64 and more": (2**32 + 1, 2**32),
    "product beyond floats": (2**63,) * 32,
    "33 dimensions": (1,) * 33,
    "many dimensions": (1,) * 200_000,
    "an empty dimension": (0, 2**63),
}


@contextmanager
def check_cheap_refusal(*refusals: type[Exception]) -> Iterator[None]:
    """Asserts that the block is refused, in 100 ms, with a short text and 64 MiB more memory at most."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    gc.disable()  # the garbage of other tests is not of this one
    before, begun = peak_bytes(), time.thread_time()
    try:
        with pytest.raises(refusals) as refused:
            yield
    finally:
        gc.enable()
    took, more = time.thread_time() - begun, peak_bytes() - before
    assert took < WITHIN_S
    assert more < MOST_MORE
    assert len(str(refused.value)) < LONGEST_TEXT


def peak_bytes() -> int:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def described(shape: tuple[int, ...]) -> tensor_pb2.Variable:
    message = Variable(1).to_proto("w")
    del message.shape[:]
    message.shape.extend(shape)
    return message


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
class TestShapes:
    def test_of_variables_that_are_described(self, shape: tuple[int, ...]) -> None:
        message = described(shape)
        with check_cheap_refusal(errors.InvalidVariable, errors.LimitExceeded):
            Descriptions().decode(job_pb2.DescribeRequest(variables=[message], samples=1))
        with check_cheap_refusal(errors.InvalidVariable, errors.LimitExceeded):
            from_protos([message])

    def test_of_a_placement(self, shape: tuple[int, ...]) -> None:
        message = tensor_pb2.Placement.FromString(placement().encoded)
        message.variables[0].CopyFrom(described(shape))
        with check_cheap_refusal(errors.InvalidVariable, errors.LimitExceeded):
            Placement.from_proto(message)

    def test_of_tensors_in_checkpoints(self, shape: tuple[int, ...], tmp_path: Path) -> None:
        if shape == (1,) * len(shape):
            shape = (*shape, 5 << 40)  # otherwise it is no lie
        header = {"w": {"dtype": "F32", "shape": list(shape), "data_offsets": [0, 16]}}
        text = json.dumps(header).encode()
        path = tmp_path / "x.safetensors"
        path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(16))
        with check_cheap_refusal(errors.CorruptCheckpoint):
            Checkpoints(tmp_path / "to").import_file(path, "job")

    def test_of_arrays_in_files(self, shape: tuple[int, ...], tmp_path: Path) -> None:
        if shape == (1,) * 33:
            shape = (1,) * 65  # NumPy's limit is 64
        for name, data in {
            "x.npy": npy(shape),
            "x.npz": npz(npy(shape)),
            "packed.npz": npz(npy(shape), packed=True),
        }.items():
            (tmp_path / name).write_bytes(data)
            with check_cheap_refusal(errors.InvalidData):
                Arrays(str(tmp_path / name))


def npy(shape: tuple[int, ...], descr: str = "'<f4'", payload: bytes = bytes(64)) -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()
    return b"\x93NUMPY\x02\x00" + struct.pack("<I", len(text)) + text + payload


def npz(member: bytes, *, packed: bool = False) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as archive:
        archive.writestr("w.npy", member)
    return out.getvalue()


def config(variables: dict[str, Variable], optimizer: optim.Optimizer) -> JobShardConfig:
    return JobShardConfig("job", 1, variables, optimizer, Asynchronous(), 0)


def test_shards_that_do_not_fit_into_a_server_are_refused_before_they_are_allocated() -> None:
    variables = {"w": Variable((1 << 38,))}  # 1 TiB, the largest
    piece = tensor_pb2.Slice(variable="w", row_start=0, row_stop=1 << 38)
    arena = tensor_pb2.ArenaLayout(dtype=tensor_pb2.FLOAT32, aggregation=tensor_pb2.TRAINABLE, slices=[piece])
    layout = ShardLayout.from_proto(tensor_pb2.ShardLayout(shard=0, arenas=[arena]), variables)
    store = ShardStore(most_bytes=1 << 39)
    with check_cheap_refusal(errors.LimitExceeded):
        store.create(config(variables, optim.SGD(0.1)), [layout])
    assert not store.hosted.all()


def test_slots_count_and_shards_of_an_earlier_generation_do_not() -> None:
    variables = {"w": Variable((1 << 10,))}
    piece = tensor_pb2.Slice(variable="w", row_start=0, row_stop=1 << 10)
    arena = tensor_pb2.ArenaLayout(dtype=tensor_pb2.FLOAT32, aggregation=tensor_pb2.TRAINABLE, slices=[piece])
    layout = ShardLayout.from_proto(tensor_pb2.ShardLayout(shard=0, arenas=[arena]), variables)
    store = ShardStore(most_bytes=3 << 12)
    with pytest.raises(errors.LimitExceeded, match="12287"):
        ShardStore(most_bytes=(3 << 12) - 1).create(config(variables, optim.Adam(0.1)), [layout])
    for generation in (1, 1, 2):
        wanted = JobShardConfig("job", generation, variables, optim.Adam(0.1), Asynchronous(), 0)
        assert store.create(wanted, [layout]) == 3 << 12
    store.clear()


LIES = {
    "offset of 2^63": Chunk(0, 0, 2**63, memoryview(bytes(8))),
    "arena that is not there": Chunk(0, 2**32 - 1, 0, memoryview(bytes(8))),
    "more than the slab": Chunk(0, 0, 0, memoryview(bytes(4096))),
}


@pytest.mark.parametrize("chunk", LIES.values(), ids=LIES)
def test_lies_of_chunks(chunk: Chunk) -> None:
    (target,) = chosen("chunks")
    target.start()
    values = b"".join(encode_push(None, [chunk]))
    with check_cheap_refusal(errors.BadChunk):
        target.run(values)


@pytest.mark.parametrize("size", [2**31, 2**32 - 1, 2**63, 2**64 - 1])
def test_a_chunk_message_that_promises_more_bytes_than_it_has(size: int) -> None:
    with check_cheap_refusal(errors.BadChunk):
        decode_push(b"\x12" + varint(size) + b"\x22" + varint(size) + bytes(64))


@pytest.mark.parametrize("size", [MAX_MESSAGE_BYTES + 1, 2**31, 2**32 - 1])
def test_a_frame_of_two_gigabytes(size: int) -> None:
    lanes = Lanes()
    lanes.start()
    with check_cheap_refusal(errors.BadFrame):
        lanes.run(frame(3)[:4] + size.to_bytes(4, "little") + bytes(64))
    lanes.stop()


def test_a_push_header_with_many_shards() -> None:
    lanes = Lanes()
    lanes.start()
    header = pb.PushHeader(stamp=stamp(), shards=[2**32 - 1] * 10_000, versions=[2**64 - 1] * 1000, weight=1e38)
    message = frame(4, pb.PushRequest(header=header).SerializeToString())
    with check_cheap_refusal(errors.Unreachable):  # the call was refused, and the client has gone
        lanes.run(message)
    lanes.stop()


@pytest.mark.parametrize("size", [2**31, 2**63, 2**64 - 1])
def test_a_tensor_file_with_a_long_header(size: int) -> None:
    with check_cheap_refusal(errors.CorruptCheckpoint):
        header_bytes(struct.pack("<Q", size), 2**63, "it")


ODD_ARRAYS = {
    "Python objects": npy((2,), "'|O'"),
    "a negative dimension": npy((-1,)),
    "two negative dimensions": npy((-4, -4)),
    "no bytes an element": npy((2**62,), "'|S0'"),
    "a header of 4 GiB": b"\x93NUMPY\x02\x00\xff\xff\xff\xff" + b" " * 64,
    "a deep header": b"\x93NUMPY\x01\x00\x00\x20" + b"[" * 8192,
    "a header of operators": b"\x93NUMPY\x01\x00\x00\x20" + b"-" * 8191 + b"1",
}


@pytest.mark.parametrize("data", ODD_ARRAYS.values(), ids=ODD_ARRAYS)
def test_arrays_that_are_none(data: bytes, tmp_path: Path) -> None:
    for name, content in {"x.npy": data, "x.npz": npz(data), "packed.npz": npz(data, packed=True)}.items():
        (tmp_path / name).write_bytes(content)
        with check_cheap_refusal(errors.InvalidData):
            Arrays(str(tmp_path / name))


class TestBombs:
    """Files of some KB that decompress to much more."""

    def test_an_npz_file_beyond_max_bytes(self, tmp_path: Path) -> None:
        (tmp_path / "x.npz").write_bytes(npz(npy((1 << 25,), payload=bytes(1 << 27)), packed=True))
        with check_cheap_refusal(errors.InvalidData):
            Arrays(str(tmp_path / "x.npz"), max_bytes=1 << 26)

    def test_a_member_whose_array_is_smaller_than_it(self, tmp_path: Path) -> None:
        (tmp_path / "x.npz").write_bytes(npz(npy((2,), payload=bytes(1 << 27)), packed=True))
        with check_cheap_refusal(errors.InvalidData):
            Arrays(str(tmp_path / "x.npz"))

    def test_an_npz_file_that_promises_more_than_deflate_can(self, tmp_path: Path) -> None:
        data = bytearray(npz(npy((1 << 29,)), packed=True))
        entry = data.index(b"PK\x01\x02")
        data[entry + 24 : entry + 28] = struct.pack("<I", 2**31 + 100)
        (tmp_path / "x.npz").write_bytes(data)
        with check_cheap_refusal(errors.InvalidData):
            Arrays(str(tmp_path / "x.npz"))

    @pytest.mark.parametrize(
        "content", [idx_bytes((2**32 - 1,) * 3, payload=bytes(64)), idx_bytes((2, 2, 2), payload=bytes(1 << 27))]
    )
    def test_an_idx_file(self, content: bytes, tmp_path: Path) -> None:
        images, labels = tmp_path / "images.gz", tmp_path / "labels"
        images.write_bytes(gzip.compress(content, 1))
        labels.write_bytes(idx_bytes((2,)))
        with check_cheap_refusal(errors.InvalidData):
            Idx(images, labels)

    @pytest.mark.parametrize("rows", [2**62, -1, 2**47])
    def test_a_parquet_file_that_promises_rows(
        self, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "x.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"x": [1.0]}), path)
        real = pyarrow.parquet.ParquetFile

        def lying(source: Any, **options: Any) -> Any:
            schema = real(source, **options).schema_arrow
            metadata = SimpleNamespace(num_row_groups=1, row_group=lambda _: SimpleNamespace(num_rows=rows))
            return _Lying(schema_arrow=schema, metadata=metadata)

        monkeypatch.setattr(pyarrow.parquet, "ParquetFile", lying)
        with check_cheap_refusal(errors.InvalidData):
            Parquet(str(path))

    def test_a_parquet_file_is_decoded_in_parts(self, tmp_path: Path) -> None:
        path = tmp_path / "x.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"x": np.zeros(1 << 24)}), path)  # 128 MiB in some KB
        assert path.stat().st_size < 1 << 20
        dataset = Parquet(str(path), block_bytes=4 << 20)

        def read(_data: bytes) -> None:
            for _ in dataset.read_blocks(0, 1):
                raise errors.InvalidData("one block is enough")

        with check_cheap_refusal(errors.InvalidData):
            read(b"")
        attempt(SimpleTarget("parquet", list, read), b"")


class _Lying(SimpleNamespace):
    """A Parquet file whose footer lies."""

    def __enter__(self) -> "_Lying":
        return self

    def __exit__(self, *_: object) -> None: ...
