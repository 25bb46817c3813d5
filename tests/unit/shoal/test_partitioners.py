import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors, partitioners
from shoal.partitioners import FixedShards, MaxSize, MinSize, Partitioner
from shoal.v1 import tensor_pb2

untyped_shards: Any = FixedShards  # for arguments of wrong types

FLOAT32 = np.dtype(np.float32)

counts = st.integers(1, 100)
sizes = st.integers(1, 10_000)
every = (
    st.builds(FixedShards, counts)
    | st.builds(MinSize, sizes, max_slices=counts)
    | st.builds(MaxSize, sizes, st.none() | counts)
)
shapes = st.just(()) | st.lists(st.integers(1, 200), min_size=1, max_size=3).map(tuple)
dtypes = st.sampled_from(["float32", "float64", "float16", "int64"]).map(np.dtype)


@given(partitioner=every, shape=shapes, dtype=dtypes)
def test_slices_cover_each_row_once_and_evenly(
    partitioner: Partitioner, shape: tuple[int, ...], dtype: np.dtype
) -> None:
    slices = partitioner.slices(shape, dtype)
    rows = [row for start, stop in slices for row in range(start, stop)]
    assert rows == list(range(shape[0] if shape else 1))
    lengths = [stop - start for start, stop in slices]
    assert min(lengths) >= 1
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@given(min_bytes=sizes, max_slices=counts, shape=shapes, dtype=dtypes)
def test_min_size_keeps_its_promise(min_bytes: int, max_slices: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
    slices = MinSize(min_bytes, max_slices=max_slices).slices(shape, dtype)
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    assert len(slices) <= max_slices
    assert len(slices) == 1 or all((stop - start) * row_bytes >= min_bytes for start, stop in slices)


@given(max_bytes=sizes, shape=shapes, dtype=dtypes)
def test_max_size_keeps_its_promise(max_bytes: int, shape: tuple[int, ...], dtype: np.dtype) -> None:
    row_bytes = math.prod(shape[1:]) * dtype.itemsize
    for start, stop in MaxSize(max_bytes).slices(shape, dtype):
        assert (stop - start) * row_bytes <= max_bytes or stop - start == 1


@given(partitioner=every)
def test_proto_roundtrip(partitioner: Partitioner) -> None:
    assert partitioners.from_proto(partitioner.to_proto()) == partitioner


def test_no_name_on_the_wire_is_no_partitioner() -> None:
    assert partitioners.from_proto(tensor_pb2.Partitioner()) is None


# From the documentation of TensorFlow's partitioners.
@pytest.mark.parametrize(
    ("partitioner", "shape", "count"),
    [
        (FixedShards(2), (10, 3), 2),
        (FixedShards(20), (10, 3), 10),
        (MinSize(4, max_slices=2), (6, 1), 2),
        (MinSize(4, max_slices=10), (6, 1), 6),
        (MinSize(max_slices=20), (1024, 1024), 16),
        (MaxSize(4), (6, 1), 6),
        (MaxSize(4, max_slices=2), (6, 1), 2),
        (MaxSize(1024), (6, 1), 1),
        (FixedShards(3), (), 1),
        (MinSize(1, max_slices=3), (), 1),
        (MaxSize(1), (), 1),
    ],
    ids=str,
)
def test_counts(partitioner: Partitioner, shape: tuple[int, ...], count: int) -> None:
    assert len(partitioner.slices(shape, FLOAT32)) == count


def test_the_first_slices_are_the_larger_ones() -> None:
    assert FixedShards(3).slices((8, 2), FLOAT32) == [(0, 3), (3, 6), (6, 8)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FixedShards(0), "partitioner FixedShards: count is 0; it must be an integer above 0"),
        (lambda: untyped_shards(2.5), "partitioner FixedShards: count is 2.5; it must be an integer above 0"),
        (lambda: MinSize(0, max_slices=1), "partitioner MinSize: min_bytes is 0; it must be an integer above 0"),
        (lambda: MinSize(max_slices=-1), "partitioner MinSize: max_slices is -1; it must be an integer above 0"),
        (lambda: MaxSize(-4), "partitioner MaxSize: max_bytes is -4; it must be an integer above 0"),
        (lambda: MaxSize(4, 0), "partitioner MaxSize: max_slices is 0; it must be an integer above 0"),
        (
            lambda: MaxSize(4).slices((100_000,), FLOAT32),
            "partitioner MaxSize: it cuts the shape (100000,) of float32 into 100,000 slices; choose larger slices, "
            "at most 16,384 of them",
        ),
        (
            lambda: partitioners.from_proto(tensor_pb2.Partitioner(name="hash")),
            "there is no partitioner 'hash'; choose one of fixed_shards, min_size, max_size, or none",
        ),
        (
            lambda: partitioners.from_proto(tensor_pb2.Partitioner(name="fixed_shards")),
            "partitioner 'fixed_shards' does not take the parameters []",
        ),
        (
            lambda: partitioners.from_proto(tensor_pb2.Partitioner(name="fixed_shards", parameters={"count": 1.5})),
            "partitioner FixedShards: count is 1.5; it must be an integer above 0",
        ),
        (
            lambda: partitioners.from_proto(
                tensor_pb2.Partitioner(name="fixed_shards", parameters={"count": math.inf})
            ),
            "partitioner FixedShards: count is inf; it must be an integer above 0",
        ),
    ],
)
def test_invalid_partitioner_raises_an_error_with_advice(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(errors.InvalidVariable) as raised:
        make()
    assert raised.value.message.startswith(message)
