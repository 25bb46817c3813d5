"""Packing of arrays into chunks and regions, and their decoding by the receiver."""

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._transport.segment import Regions
from shoal._wire import framing, packing, plans, pull_decoder
from shoal._wire.chunks import Chunk
from shoal._wire.framing import Assembler
from shoal._wire.layout import Aggregation, wire_dtype
from shoal._wire.limits import CHUNK_BYTES
from shoal._wire.packing import CompleteArrays, Packer
from shoal._wire.placement import Placement, ShardPlacement
from shoal._wire.pull_decoder import PullDecoder
from shoal._wire.slabs import CallLayout
from shoal.partitioners import FixedShards
from shoal.variables import Variable
from shoal_coordinator.cluster import plan_shards

TRAINABLE = [Aggregation.TRAINABLE]
EVERY = list(Aggregation)


def placed(job: dict[str, Variable], shards: int = 1, wire: str = "float32") -> Placement:
    layouts = plan_shards(job, shards, np.dtype(wire))
    return Placement("job", 1, job, tuple(ShardPlacement(layout, "server", "host:1") for layout in layouts))


def layout_of(placement: Placement) -> CallLayout:
    return CallLayout(shard.layout for shard in placement.shards)


def random_array(variable: Variable, rng: np.random.Generator) -> np.ndarray:
    scale = 1000 if variable.dtype.kind == "i" else 1
    return np.asarray(scale * rng.normal(size=variable.shape)).astype(variable.dtype)


def as_it_arrives(array: np.ndarray, variable: Variable, wire: str) -> np.ndarray:
    """The array after it was cast for the wire and back."""
    return array.astype(wire_dtype(variable.dtype, variable.aggregation, np.dtype(wire))).astype(variable.dtype)


def fresh(nbytes: int) -> np.ndarray:
    return np.empty(nbytes, np.uint8)


def never(nbytes: int) -> np.ndarray:
    raise AssertionError(f"{nbytes} bytes were copied")


@contextmanager
def limits(chunk_bytes: int, scattered_bytes: int | None = None) -> Iterator[None]:
    """Small enough for small arrays to be what large ones are."""
    with (
        mock.patch.object(packing, "CHUNK_BYTES", chunk_bytes),
        mock.patch.object(framing, "CHUNK_BYTES", chunk_bytes),
        mock.patch.object(packing, "GATHERED_BYTES", chunk_bytes // 4),
        mock.patch.object(plans, "GATHERED_BYTES", chunk_bytes // 4),
        mock.patch.object(plans, "CHUNK_BYTES", chunk_bytes),
        ExitStack() as stack,
    ):
        if scattered_bytes is not None:
            stack.enter_context(mock.patch.object(pull_decoder, "SCATTERED_BYTES", scattered_bytes))
        yield


def sent(placement: Placement, arrays: Mapping[str, np.ndarray], aggregations: list[Aggregation]) -> list[Chunk]:
    packer = Packer(placement)
    packer.check(arrays, aggregations)
    return list(packer.chunks(layout_of(placement), CompleteArrays(arrays), aggregations))


def received(placement: Placement, chunks: list[Chunk], decoder: PullDecoder) -> dict[str, np.ndarray]:
    layout = layout_of(placement)
    assembler = Assembler(layout, {slab: decoder.runs(slab) for slab in layout.slabs})
    for chunk in chunks:
        assembler.add(chunk)
    assembler.finish()
    return decoder.values()


def slot_with(placement: Placement, arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Memory as another process fills it: what is in no slab stays what it was."""
    slot = np.full(layout_of(placement).region_bytes, 0xA5, np.uint8)
    Packer(placement).write(layout_of(placement), CompleteArrays(arrays), EVERY, slot)
    return slot


def adopted(placement: Placement, slot: np.ndarray, decoder: PullDecoder) -> dict[str, np.ndarray]:
    arrays = layout_of(placement).arrays(slot)
    for slab, elements in arrays.items():
        decoder.expect(slab, elements)
    for slab, elements in arrays.items():
        decoder.adopt(slab, elements)
    return decoder.values()


def check_values(
    values: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray], job: dict[str, Variable], wire: str
) -> None:
    assert list(values) == list(job)
    for name, variable in job.items():
        assert (values[name].shape, values[name].dtype) == (variable.shape, variable.dtype)
        assert values[name].flags.writeable
        np.testing.assert_array_equal(values[name], as_it_arrives(arrays[name], variable, wire))


shapes = st.lists(st.integers(1, 12), max_size=3).map(tuple)
partitions = st.sampled_from([None, FixedShards(2), FixedShards(3)])
variables = st.one_of(
    st.builds(Variable, shapes, st.sampled_from(["float32", "float64", "float16", "bfloat16"]), partitioner=partitions),
    st.builds(
        Variable,
        shapes,
        st.sampled_from(["float32", "float64"]),
        trainable=st.just(False),
        aggregation=st.sampled_from(["mean", "sum", "last"]),
        partitioner=partitions,
    ),
    st.builds(
        Variable, shapes, st.just("int64"), trainable=st.just(False), aggregation=st.sampled_from(["sum", "last"])
    ),
)
jobs = st.lists(variables, min_size=1, max_size=12).map(lambda drawn: {f"v{i}": v for i, v in enumerate(drawn)})
wires = st.sampled_from(["float32", "bfloat16", "float16"])
chunk_sizes = st.sampled_from([32, 256, 1024, CHUNK_BYTES])
scattered = st.sampled_from([0, 200, 1 << 26])


def drawn_arrays(job: dict[str, Variable], seed: int, transposed: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    arrays = {name: random_array(variable, rng) for name, variable in job.items()}
    # The same values, in Fortran's order.
    return {name: np.asarray(array, order="F") for name, array in arrays.items()} if transposed else arrays


@given(
    job=jobs,
    shards=st.integers(1, 8),
    wire=wires,
    chunk_bytes=chunk_sizes,
    scattered_bytes=scattered,
    seed=st.integers(0, 1000),
    transposed=st.booleans(),
)
def test_chunked_arrays_are_assembled_unchanged(
    job: dict[str, Variable],
    shards: int,
    wire: str,
    chunk_bytes: int,
    scattered_bytes: int,
    seed: int,
    transposed: bool,
) -> None:
    placement, arrays = placed(job, shards, wire), drawn_arrays(job, seed, transposed)
    with limits(chunk_bytes, scattered_bytes):
        chunks = sent(placement, arrays, EVERY)
        values = received(placement, chunks, PullDecoder(Packer(placement), fresh))
    check_values(values, arrays, job, wire)


@given(job=jobs, shards=st.integers(1, 8), wire=wires, chunk_bytes=chunk_sizes, seed=st.integers(0, 1000))
def test_chunks_are_in_order_small_enough_and_of_whole_elements(
    job: dict[str, Variable], shards: int, wire: str, chunk_bytes: int, seed: int
) -> None:
    placement, arrays = placed(job, shards, wire), drawn_arrays(job, seed, transposed=False)
    with limits(chunk_bytes):
        chunks = sent(placement, arrays, EVERY)
    slabs = {slab.keys[0]: slab for slab in layout_of(placement).slabs}
    ends = dict.fromkeys(slabs, 0)
    for chunk in chunks:
        key = chunk.shard, chunk.arena
        assert chunk.offset == ends[key]
        assert 0 < len(chunk.data) <= chunk_bytes
        assert len(chunk.data) % slabs[key].wire_dtype.itemsize == 0
        assert (chunk.data.format, chunk.data.ndim, chunk.data.c_contiguous) == ("B", 1, True)
        ends[key] += len(chunk.data)
    assert ends == {key: slab.nbytes for key, slab in slabs.items()}
    order = [key for key, _ in itertools.groupby((chunk.shard, chunk.arena) for chunk in chunks)]
    assert order == list(slabs), "a slab comes in pieces, with another in between"


@given(
    job=jobs,
    shards=st.integers(1, 8),
    wire=wires,
    scattered_bytes=scattered,
    seed=st.integers(0, 1000),
    transposed=st.booleans(),
)
def test_arrays_written_to_a_region_are_adopted_unchanged(
    job: dict[str, Variable], shards: int, wire: str, scattered_bytes: int, seed: int, transposed: bool
) -> None:
    placement, arrays = placed(job, shards, wire), drawn_arrays(job, seed, transposed)
    slot = slot_with(placement, arrays)
    with limits(CHUNK_BYTES, scattered_bytes):
        values = adopted(placement, slot, PullDecoder(Packer(placement), fresh))
    check_values(values, arrays, job, wire)


@given(job=jobs, shards=st.integers(1, 4), wire=wires, seed=st.integers(0, 100))
def test_region_holds_the_bytes_that_travel_as_chunks(
    job: dict[str, Variable], shards: int, wire: str, seed: int
) -> None:
    placement, arrays = placed(job, shards, wire), drawn_arrays(job, seed, transposed=False)
    slot, layout = slot_with(placement, arrays), layout_of(placement)
    offsets = dict(zip(layout.slabs, layout.offsets, strict=True))
    inside = np.zeros(layout.region_bytes, bool)
    for chunk in sent(placement, arrays, EVERY):
        slab, first = layout.places[chunk.shard, chunk.arena]
        start = offsets[slab] + first + chunk.offset
        assert bytes(slot[start : start + len(chunk.data)]) == bytes(chunk.data)
        inside[start : start + len(chunk.data)] = True
    assert np.all(slot[~inside] == 0xA5), "something was written beside the slabs"


def test_only_the_aggregations_asked_for_are_packed() -> None:
    job = {"mean": Variable(2, trainable=False, aggregation="mean"), "kernel": Variable((2, 2))}
    placement = placed(job)
    layout = layout_of(placement)
    arrays = {"kernel": np.ones((2, 2), np.float32)}
    (chunk,) = sent(placement, arrays, TRAINABLE)
    assert layout.places[chunk.shard, chunk.arena][0].aggregation is Aggregation.TRAINABLE
    assert np.frombuffer(chunk.data, np.float32).tolist() == [1.0] * 4

    slot = np.full(layout.region_bytes, 0xA5, np.uint8)
    Packer(placement).write(layout, CompleteArrays(arrays), TRAINABLE, slot)
    offset = layout.offsets[layout.slabs.index(layout.places[chunk.shard, chunk.arena][0])]
    assert slot[offset : offset + 16].view(np.float32).tolist() == [1.0] * 4
    assert np.count_nonzero(slot != 0xA5) == 16


def as_array(chunk: Chunk) -> np.ndarray:
    return np.frombuffer(chunk.data, np.uint8)


def test_large_arrays_are_not_copied_and_small_ones_are_gathered() -> None:
    job = {
        "first": Variable(3),
        "second": Variable(5),
        "large": Variable((CHUNK_BYTES // 4 + 1000,)),
        "third": Variable(7),
        "medium": Variable((CHUNK_BYTES // 16,)),
    }
    arrays = drawn_arrays(job, 0, transposed=False)
    chunks = sent(placed(job), arrays, TRAINABLE)
    assert [len(chunk.data) for chunk in chunks] == [4 * 8, CHUNK_BYTES, 4_000, 4 * 7, CHUNK_BYTES // 4]
    shared = [{name for name, array in arrays.items() if np.shares_memory(array, as_array(chunk))} for chunk in chunks]
    assert shared == [set(), {"large"}, {"large"}, set(), {"medium"}]


def test_small_arrays_share_chunks() -> None:
    job = {f"v{i}": Variable((CHUNK_BYTES // 32,)) for i in range(20)}  # an eighth of a chunk each
    chunks = sent(placed(job), drawn_arrays(job, 0, transposed=False), TRAINABLE)
    assert [len(chunk.data) for chunk in chunks] == [CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES // 2]


def test_parts_of_an_array_are_not_copied_either() -> None:
    placement = placed({"kernel": Variable((4, CHUNK_BYTES // 8), partitioner=FixedShards(2))}, shards=2)
    array = np.arange(CHUNK_BYTES // 2, dtype=np.float32).reshape(4, -1)
    for chunk in sent(placement, {"kernel": array}, TRAINABLE):
        assert np.shares_memory(as_array(chunk), array)


def test_a_large_array_is_cast_chunk_by_chunk() -> None:
    placement = placed({"kernel": Variable(CHUNK_BYTES)}, wire="bfloat16")
    array = np.random.default_rng(0).normal(size=CHUNK_BYTES).astype(np.float32)
    chunks = sent(placement, {"kernel": array}, TRAINABLE)
    assert [len(chunk.data) for chunk in chunks] == [CHUNK_BYTES] * 2
    np.testing.assert_array_equal(
        np.concatenate([np.frombuffer(chunk.data, ml_dtypes.bfloat16) for chunk in chunks]),
        array.astype(ml_dtypes.bfloat16),
    )


@pytest.mark.parametrize("elements", [4, CHUNK_BYTES])
def test_values_too_large_for_float16_travel_as_infinity_without_a_warning(elements: int) -> None:
    placement = placed({"kernel": Variable(elements)}, wire="float16")
    arrays = {"kernel": np.full(elements, 65_520, np.float32)}  # half-way between 65,504 and what would come next
    arrays["kernel"][0] = 65_519
    packed = [np.frombuffer(chunk.data, np.float16) for chunk in sent(placement, arrays, TRAINABLE)]
    packed.append(slot_with(placement, arrays)[: 2 * elements].view(np.float16))
    for flat in (np.concatenate(packed[:-1]), packed[-1]):
        assert flat[0] == 65_504
        assert np.all(flat[1:] == np.inf)


class Counted:
    """Memory, and how much of it was asked for."""

    def __init__(self) -> None:
        self.lent: list[np.ndarray] = []

    def __call__(self, nbytes: int) -> np.ndarray:
        self.lent.append(fresh(nbytes))
        return self.lent[-1]

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.lent)


SPLIT = {
    "table": Variable((9, 4), partitioner=FixedShards(3)),
    "bias": Variable(5),
    "count": Variable((4, 2), "int64", trainable=False, aggregation="sum", partitioner=FixedShards(2)),
    "scale": Variable(()),
}


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_large_arena_is_received_in_place_and_held_once(wire: str) -> None:
    placement, arrays = placed(SPLIT, 3, wire), drawn_arrays(SPLIT, 1, transposed=False)
    whole = sum(variable.nbytes for variable in SPLIT.values())
    for scattered_bytes in (1, 1 << 26):
        memory = Counted()
        decoder = PullDecoder(Packer(placement), memory)
        with limits(CHUNK_BYTES, scattered_bytes):
            runs = [run for slab in layout_of(placement).slabs for run in decoder.runs(slab)]
            values = received(placement, sent(placement, arrays, EVERY), decoder)
        check_values(values, arrays, SPLIT, wire)
        table = [run for run in runs if np.shares_memory(run.target, values["table"])]
        if scattered_bytes == 1:
            assert [run.stop - run.start for run in table] == [12, 12, 12]
        else:
            assert table == []
    # Asked again, as when a call is repeated, for what comes in one piece; no variable is there twice.
    memory = Counted()
    with limits(CHUNK_BYTES, 1):
        received(placement, sent(placement, arrays, EVERY), PullDecoder(Packer(placement), memory))
    assert memory.nbytes == whole


def test_repeated_arena_replaces_the_first_one() -> None:
    """A pull that broke off is repeated into the same memory."""
    placement = placed(SPLIT, 2)
    first, second = (drawn_arrays(SPLIT, seed, transposed=False) for seed in (1, 2))
    for scattered_bytes in (1, 1 << 26):
        decoder = PullDecoder(Packer(placement), fresh)
        with limits(CHUNK_BYTES, scattered_bytes):
            received(placement, sent(placement, first, EVERY), decoder)
            values = received(placement, sent(placement, second, EVERY), decoder)
        check_values(values, second, SPLIT, "float32")


@pytest.mark.parametrize("wire", ["float32", "float16"])
@pytest.mark.parametrize("where", ["in another slot", "as chunks"])
def test_values_that_arrive_elsewhere_than_expected_are_used(wire: str, where: str) -> None:
    """Such as those of a pull that is made again, since the first one's lane was lost."""
    placement = placed(SPLIT, 2, wire)
    lost, arrays = (drawn_arrays(SPLIT, seed, transposed=False) for seed in (1, 2))
    decoder = PullDecoder(Packer(placement), fresh)
    for slab, elements in layout_of(placement).arrays(slot_with(placement, lost)).items():
        decoder.expect(slab, elements)
    if where == "as chunks":
        values = received(placement, sent(placement, arrays, EVERY), decoder)
    else:
        values = adopted(placement, slot_with(placement, arrays), decoder)
    check_values(values, arrays, SPLIT, wire)


def test_adopted_values_are_views_of_their_region_and_keep_it_lent() -> None:
    job = {"kernel": Variable((3, 4)), "bias": Variable(5)}
    placement, arrays = placed(job), drawn_arrays(job, 0, transposed=False)
    source = slot_with(placement, arrays)
    slots = Regions([memoryview(bytearray(source.nbytes))])
    taken = slots.take()
    assert taken
    np.copyto(taken[1], source)
    values = adopted(placement, taken[1], PullDecoder(Packer(placement), never))
    assert all(np.shares_memory(value, taken[1]) for value in values.values())
    check_values(values, arrays, job, "float32")
    kept = values["bias"][2:]
    del taken, values
    assert slots.take() is None, "somebody still looks into it"
    np.testing.assert_array_equal(kept, arrays["bias"][2:])
    del kept
    assert slots.take()


@pytest.mark.parametrize(
    ("job", "wire"),
    [({"kernel": Variable((3, 4))}, "float16"), ({"kernel": Variable((4, 4), partitioner=FixedShards(2))}, "float32")],
    ids=["rounded", "in parts"],
)
def test_copied_values_release_their_region(job: dict[str, Variable], wire: str) -> None:
    placement, arrays = placed(job, 2, wire), drawn_arrays(job, 0, transposed=False)
    source = slot_with(placement, arrays)
    slots = Regions([memoryview(bytearray(source.nbytes))])
    taken = slots.take()
    assert taken
    np.copyto(taken[1], source)
    values = adopted(placement, taken[1], PullDecoder(Packer(placement), fresh))
    del taken
    assert slots.take()
    check_values(values, arrays, job, wire)


def test_values_may_be_changed_and_stay_apart() -> None:
    job = {"a": Variable(4), "b": Variable(4)}
    placement, arrays = placed(job), drawn_arrays(job, 0, transposed=False)
    values = received(placement, sent(placement, arrays, EVERY), PullDecoder(Packer(placement), fresh))
    values["a"] += 1
    np.testing.assert_array_equal(values["b"], arrays["b"])


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        ("float32", 1.5),
        ("float32", np.float32(1.5)),
        ("float32", np.float64(1.5)),
        ("bfloat16", 1.5),
        ("bfloat16", ml_dtypes.bfloat16(1.5)),
        ("float16", np.float16(1.5)),
        ("int64", 3),
        ("int64", np.int32(3)),
    ],
)
@pytest.mark.parametrize("neighbours", [0, 2])
def test_numbers_stand_for_scalars(dtype: str, number: float, neighbours: int) -> None:
    scalar = Variable((), dtype, trainable=False, aggregation="sum")
    job = {"scalar": scalar} | {
        f"v{i}": Variable(2, dtype, trainable=False, aggregation="sum") for i in range(neighbours)
    }
    arrays: dict[str, Any] = {name: np.zeros(variable.shape, variable.dtype) for name, variable in job.items()}
    arrays["scalar"] = number
    placement = placed(job)
    (chunk,) = sent(placement, arrays, EVERY)
    assert len(chunk.data) == scalar.dtype.itemsize * (1 + 2 * neighbours)
    assert np.frombuffer(chunk.data, scalar.dtype)[0] == number
    assert slot_with(placement, arrays)[: scalar.dtype.itemsize].view(scalar.dtype)[0] == number


JOB = {
    "kernel": Variable((2, 3)),
    "bias": Variable(3),
    "scale": Variable(()),
    "steps": Variable((), "int64", trainable=False, aggregation="sum"),
}
GOOD: dict[str, Any] = {
    "kernel": np.zeros((2, 3), np.float32),
    "bias": np.zeros(3, np.float32),
    "scale": np.float32(1),
}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"bias": None}, "'bias' is missing"),
        ({"bias": np.zeros(4, np.float32)}, "'bias' has shape (4,), not (3,)"),
        ({"bias": np.zeros(3)}, "'bias' is float64: cast it to float32"),
        ({"bias": np.zeros((3, 1))}, "'bias' has shape (3, 1), not (3,) and is float64: cast it to float32"),
        ({"bias": [0.0, 0.0, 0.0]}, "'bias' is a list, not a NumPy array"),
        ({"bias": 0.0}, "'bias' is a number, not an array of shape (3,)"),
        ({"scale": 1}, "'scale' is int64: cast it to float32"),
        ({"scale": True}, "'scale' is bool: cast it to float32"),
        ({"scale": np.zeros(1, np.float32)}, "'scale' has shape (1,), not ()"),
        ({"offset": np.zeros(3)}, "'offset' is not a variable"),
        (
            {"steps": np.int64(1)},
            "'steps' (int64) is not trainable: give it as an update, or declare it with a float dtype",
        ),
    ],
    ids=str,
)
def test_check_names_the_array_that_does_not_fit(changes: dict[str, Any], complaint: str) -> None:
    packer = Packer(placed(JOB))
    packer.check(GOOD, TRAINABLE)
    arrays = {name: array for name, array in (GOOD | changes).items() if array is not None}
    with pytest.raises(errors.InvalidGradient) as raised:
        packer.check(arrays, TRAINABLE)
    said = raised.value.message.partition(". Variables of a float dtype are trainable.")[
        0
    ]  # of a gradient that is missing
    assert said == f"the arrays do not fit the job's variables: {complaint}"


@pytest.mark.parametrize("elements", [12, CHUNK_BYTES])
def test_arrays_of_the_wire_dtype_travel_as_the_same_bytes(elements: int) -> None:
    """Gradients that a device has cast, or that a program computes in halves; perhaps not all of them."""
    placement = placed({"kernel": Variable(elements), "bias": Variable(3)}, wire="bfloat16")
    arrays = {"kernel": np.linspace(-1, 1, elements, dtype=np.float32), "bias": np.ones(3, np.float32)}
    halves = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    packer, wanted = Packer(placement), [chunk.data.tobytes() for chunk in sent(placement, arrays, TRAINABLE)]
    for cast in (halves, arrays | {"kernel": halves["kernel"]}):
        packer.check(cast, TRAINABLE)
        packer.check_one("kernel", cast["kernel"], TRAINABLE)
        assert [chunk.data.tobytes() for chunk in sent(placement, cast, TRAINABLE)] == wanted
    with pytest.raises(errors.InvalidGradient, match="'bias' is float16: cast it to float32"):
        packer.check(arrays | {"bias": np.ones(3, np.float16)}, TRAINABLE)


def test_check_lists_all_that_does_not_fit() -> None:
    number: Any = 1.0  # stands for a scalar
    with pytest.raises(errors.InvalidGradient) as raised:
        Packer(placed(JOB)).check({"kernels": GOOD["kernel"], "bias": np.zeros(3), "scale": number}, TRAINABLE)
    assert raised.value.message == (
        "the arrays do not fit the job's variables: 'kernel' is missing; 'bias' is float64: cast it to float32; "
        "'kernels' is not a variable. Variables of a float dtype are trainable. If one is not trained, declare it with "
        "shoal.Variable.of(array, trainable=False), and push its values in `updates`"
    )


def test_check_lists_at_most_50_arrays() -> None:
    packer = Packer(placed({f"v{i}": Variable(1) for i in range(60)}))
    with pytest.raises(errors.InvalidGradient, match=r"'v49' is missing; and 10 more\. Variables"):
        packer.check({}, TRAINABLE)


def test_ten_thousand_small_arrays_are_packed_within_a_tenth_of_a_second() -> None:
    job = {f"layer_{i}/kernel": Variable((16, 16)) for i in range(10_000)}
    placement = placed(job, 4)
    packer = Packer(placement)
    arrays = {name: np.ones((16, 16), np.float32) for name in job}

    def seconds() -> float:
        start = time.thread_time()
        packer.check(arrays, TRAINABLE)
        for layout in packer.groups.values():
            for _ in packer.chunks(layout, CompleteArrays(arrays), TRAINABLE):
                pass
        return time.thread_time() - start

    # It takes about 20 ms of a processor; the bound leaves room for a slower one, not for another order of magnitude.
    assert min(seconds() for _ in range(5)) < 0.1
