import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._layout import Aggregation, Placement, ShardPlacement
from shoal._packing import Packer
from shoal.partitioners import FixedShards
from shoal.variables import Variable
from shoal_coordinator.placement import plan_shards

TRAINABLE = [Aggregation.TRAINABLE]
EVERY = list(Aggregation)


def placed(job: dict[str, Variable], shards: int = 1) -> Placement:
    layouts = plan_shards(job, shards)
    return Placement("job", 1, job, tuple(ShardPlacement(layout, "server", "host:1") for layout in layouts))


def random_array(variable: Variable, rng: np.random.Generator) -> np.ndarray:
    return np.asarray(rng.integers(-1000, 1000, variable.shape)).astype(variable.dtype)


shapes = st.lists(st.integers(1, 12), max_size=3).map(tuple)
variables = st.one_of(
    st.builds(
        Variable,
        shapes,
        st.sampled_from(["float32", "float64", "float16", "bfloat16"]),
        partitioner=st.sampled_from([None, FixedShards(3)]),
    ),
    st.builds(Variable, shapes, trainable=st.just(False), aggregation=st.sampled_from(["mean", "sum", "last"])),
    st.builds(Variable, shapes, st.just("int64"), trainable=st.just(False), aggregation=st.just("sum")),
)
jobs = st.lists(variables, min_size=1, max_size=12).map(lambda drawn: {f"v{i}": v for i, v in enumerate(drawn)})


@given(job=jobs, shards=st.integers(1, 8), seed=st.integers(0, 1000), transposed=st.booleans())
def test_what_is_packed_unpacks_the_same(job: dict[str, Variable], shards: int, seed: int, transposed: bool) -> None:
    placement = placed(job, shards)
    packer = Packer(placement)
    rng = np.random.default_rng(seed)
    arrays = {name: random_array(variable, rng) for name, variable in job.items()}
    if transposed:  # the same values, in Fortran's order
        arrays = {name: np.asarray(array, order="F") for name, array in arrays.items()}
    packer.check(arrays, EVERY)
    out = packer.empty()
    for shard in placement.shards:
        packed = list(packer.pack(shard.layout, arrays, EVERY))
        assert [index for index, _ in packed] == list(range(len(shard.layout.arenas)))
        for index, flat in packed:
            arena = shard.layout.arenas[index]
            assert (flat.shape, flat.dtype, flat.flags.c_contiguous) == ((arena.elements,), arena.dtype, True)
            packer.unpack(shard.layout, index, flat, out)
    assert out.keys() == arrays.keys()
    for name, array in arrays.items():
        assert out[name].dtype == array.dtype
        np.testing.assert_array_equal(out[name], array)


def test_only_the_aggregations_asked_for_are_packed() -> None:
    job = {"mean": Variable(2, trainable=False, aggregation="mean"), "kernel": Variable((2, 2))}
    placement = placed(job)
    arrays = {"kernel": np.ones((2, 2), np.float32)}
    packer = Packer(placement)
    packer.check(arrays, TRAINABLE)
    ((index, flat),) = packer.pack(placement.shards[0].layout, arrays, TRAINABLE)
    assert placement.shards[0].layout.arenas[index].aggregation is Aggregation.TRAINABLE
    assert flat.tolist() == [1.0] * 4


def test_one_contiguous_slice_is_not_copied() -> None:
    placement = placed({"kernel": Variable((4, 3), partitioner=FixedShards(2))}, shards=2)
    array = np.arange(12, dtype=np.float32).reshape(4, 3)
    packer = Packer(placement)
    for shard in placement.shards:
        ((_, flat),) = packer.pack(shard.layout, {"kernel": array}, TRAINABLE)
        assert np.shares_memory(flat, array)
        assert flat.size == 6


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
    arrays = {name: np.zeros(variable.shape, variable.dtype) for name, variable in job.items()} | {"scalar": number}
    placement = placed(job)
    packer = Packer(placement)
    packer.check(arrays, EVERY)
    ((_, flat),) = packer.pack(placement.shards[0].layout, arrays, EVERY)
    assert flat.dtype == scalar.dtype
    assert flat[0] == number


JOB = {
    "kernel": Variable((2, 3)),
    "bias": Variable(3),
    "scale": Variable(()),
    "steps": Variable((), "int64", trainable=False, aggregation="sum"),
}
GOOD = {
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
        ({"steps": np.int64(1)}, "'steps' is not to be sent here: it is SUM"),
    ],
    ids=str,
)
def test_check_says_what_does_not_fit(changes: dict[str, object], complaint: str) -> None:
    packer = Packer(placed(JOB))
    packer.check(GOOD, TRAINABLE)
    arrays = {name: array for name, array in (GOOD | changes).items() if array is not None}
    with pytest.raises(errors.InvalidGradient) as raised:
        packer.check(arrays, TRAINABLE)
    assert raised.value.message == f"the arrays do not fit the job's variables: {complaint}"


def test_check_lists_all_that_does_not_fit() -> None:
    with pytest.raises(errors.InvalidGradient) as raised:
        Packer(placed(JOB)).check({"kernels": GOOD["kernel"], "bias": np.zeros(3), "scale": 1.0}, TRAINABLE)
    assert raised.value.message == (
        "the arrays do not fit the job's variables: 'kernel' is missing; 'bias' is float64: cast it to float32; "
        "'kernels' is not a variable"
    )


def test_check_lists_no_more_than_one_reads() -> None:
    packer = Packer(placed({f"v{i}": Variable(1) for i in range(60)}))
    with pytest.raises(errors.InvalidGradient, match=r"'v49' is missing; and 10 more$"):
        packer.check({}, TRAINABLE)


def test_ten_thousand_small_arrays_are_packed_in_no_time() -> None:
    job = {f"layer_{i}/kernel": Variable((16, 16)) for i in range(10_000)}
    placement = placed(job, 4)
    packer = Packer(placement)
    arrays = {name: np.ones((16, 16), np.float32) for name in job}

    def seconds() -> float:
        start = time.perf_counter()
        packer.check(arrays, TRAINABLE)
        for shard in placement.shards:
            for _ in packer.pack(shard.layout, arrays, TRAINABLE):
                pass
        return time.perf_counter() - start

    # It takes about 12 ms; the bound leaves room for a busy machine, not for another order of magnitude.
    assert min(seconds() for _ in range(5)) < 0.1
