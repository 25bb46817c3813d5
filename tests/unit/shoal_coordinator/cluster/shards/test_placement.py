import math
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._wire import Slice
from shoal._wire.layout import Aggregation, ArenaLayout, ShardLayout, row_elements, rows_of
from shoal._wire.placement import Placement, ShardPlacement
from shoal.partitioners import FixedShards, MaxSize
from shoal.v1 import tensor_pb2
from shoal.variables import Variable
from shoal_coordinator.cluster.shards.placement import (
    SMALL_JOB_BYTES,
    Candidate,
    assign_shards,
    candidates_for_one_server,
    default_shards,
    plan_shards,
)

shapes = st.lists(st.integers(1, 40), max_size=3).map(tuple)
variables = st.one_of(
    st.builds(
        Variable,
        shapes,
        st.sampled_from(["float32", "float64", "bfloat16"]),
        partitioner=st.sampled_from([None, FixedShards(3), MaxSize(256)]),
    ),
    st.builds(Variable, shapes, trainable=st.just(False), aggregation=st.sampled_from(["mean", "sum", "last"])),
    st.builds(Variable, shapes, st.just("int64"), trainable=st.just(False), aggregation=st.just("sum")),
)
jobs = st.lists(variables, min_size=1, max_size=12).map(lambda drawn: {f"v{i}": v for i, v in enumerate(drawn)})
loads = st.lists(st.integers(0, 10_000), min_size=1, max_size=5).map(
    lambda held: [Candidate(f"server-{i}", f"host-{i}:1", held_bytes) for i, held_bytes in enumerate(held)]
)


def slices_of(layout: ShardLayout) -> list[tuple[ArenaLayout, Slice]]:
    return [(arena, piece) for arena in layout.arenas for piece in arena.slices]


@given(job=jobs, shards=st.integers(1, 20))
def test_each_row_lies_in_one_slice(job: dict[str, Variable], shards: int) -> None:
    layouts = plan_shards(job, shards)
    rows = sorted(
        (piece.variable, row)
        for layout in layouts
        for _, piece in slices_of(layout)
        for row in range(piece.row_start, piece.row_stop)
    )
    assert rows == sorted((name, row) for name, variable in job.items() for row in range(rows_of(variable.shape)))


@given(job=jobs, shards=st.integers(1, 20))
def test_shards_are_whole(job: dict[str, Variable], shards: int) -> None:
    layouts = plan_shards(job, shards)
    order = {name: position for position, name in enumerate(job)}
    assert [layout.shard for layout in layouts] == list(range(len(layouts)))
    assert 1 <= len(layouts) <= shards
    for layout in layouts:
        assert layout.arenas
        kinds = [(arena.dtype, arena.aggregation) for arena in layout.arenas]
        assert len(set(kinds)) == len(kinds)
        for arena in layout.arenas:
            places = [(order[piece.variable], piece.row_start) for piece in arena.slices]
            assert places
            assert places == sorted(places)
            end = 0
            for piece in arena.slices:
                variable = job[piece.variable]
                assert (variable.dtype, variable.aggregation) == (arena.dtype, arena.aggregation)
                assert piece.offset == end
                end += (piece.row_stop - piece.row_start) * row_elements(variable.shape)
            assert arena.elements == end
    assert sum(layout.nbytes for layout in layouts) == sum(variable.nbytes for variable in job.values())


@given(job=jobs, shards=st.integers(1, 20), servers=loads)
def test_loads_are_as_even_as_the_rule_promises(
    job: dict[str, Variable], shards: int, servers: list[Candidate]
) -> None:
    layouts = plan_shards(job, shards)
    largest_slice = max(
        (stop - start) * row_elements(variable.shape) * variable.dtype.itemsize
        for variable in job.values()
        for start, stop in variable.slices()
    )
    sizes = [layout.nbytes for layout in layouts]
    assert max(sizes) - min(sizes) <= largest_slice

    taken = dict.fromkeys((server.address for server in servers), 0)
    for shard in assign_shards(layouts, servers):
        taken[shard.address] += shard.layout.nbytes
    assert max(taken.values()) - min(taken.values()) <= max(sizes)


@given(job=jobs, shards=st.integers(1, 20), servers=loads)
def test_placement_survives_the_wire(job: dict[str, Variable], shards: int, servers: list[Candidate]) -> None:
    placement = Placement("job", 7, job, assign_shards(plan_shards(job, shards), servers))
    message = tensor_pb2.Placement.FromString(placement.to_proto().SerializeToString())
    decoded = Placement.from_proto(message)
    assert decoded == placement
    assert list(decoded.variables) == list(job)
    assert sum(map(len, decoded.by_server().values())) == len(placement.shards)


@given(job=jobs, shards=st.integers(1, 20))
def test_plans_are_repeatable(job: dict[str, Variable], shards: int) -> None:
    assert plan_shards(job, shards) == plan_shards(dict(job), shards)


def test_equal_shards_are_shared_out_by_count() -> None:
    layouts = plan_shards({f"v{i}": Variable((8,)) for i in range(12)}, 12)
    servers = [Candidate(name, f"{name}:1", 0) for name in "abc"]
    placement = Placement("job", 1, {}, assign_shards(layouts, servers))
    assert {address: len(shards) for address, shards in placement.by_server().items()} == {"a:1": 4, "b:1": 4, "c:1": 4}


def test_a_job_is_even_within_itself_and_held_bytes_decide_ties() -> None:
    servers = [Candidate("full", "full:1", 1000), Candidate("idle", "idle:1", 0)]
    for shards, full, idle in ((4, 2, 2), (3, 1, 2), (1, 0, 1)):
        layouts = plan_shards({f"v{i}": Variable((8,)) for i in range(shards)}, shards)
        placed = Counter(shard.server for shard in assign_shards(layouts, servers))
        assert (placed["full"], placed["idle"]) == (full, idle)


def test_shards_return_to_their_last_servers_whatever_the_load() -> None:
    layouts = plan_shards({"w": Variable((8, 4), partitioner=FixedShards(4))}, 4)
    previous_servers = ["s1", "s0", "s0", "s1"]
    servers = [Candidate("s0", "a:1", 0), Candidate("s1", "b:2", 1 << 30)]
    placed = assign_shards(layouts, servers, previous_servers)
    assert [(shard.server, shard.address) for shard in placed] == [
        ("s1", "b:2"),
        ("s0", "a:1"),
        ("s0", "a:1"),
        ("s1", "b:2"),
    ]


@pytest.mark.parametrize(
    ("previous_servers", "why"),
    [
        (["s1", "s0", "s2", "s1"], "one is not there"),
        (["s0", "s1"], "there were others"),
        (["s0", "s0", "s0", "s1"], "it can be more even"),
        ([], "nobody had them"),
    ],
)
def test_shards_are_placed_by_load_if_the_last_servers_do_not_fit(previous_servers: list[str], why: str) -> None:
    layouts = plan_shards({"w": Variable((8, 4), partitioner=FixedShards(4))}, 4)
    servers = [Candidate(name, name, 0) for name in ("s0", "s1")]
    assert assign_shards(layouts, servers, previous_servers) == assign_shards(layouts, servers), why


def test_ties_go_by_name() -> None:
    layouts = plan_shards({"v": Variable((8,))}, 1)
    (placed,) = assign_shards(layouts, [Candidate("b", "b:1", 0), Candidate("a", "a:1", 0)])
    assert placed == ShardPlacement(layouts[0], "a", "a:1")


def resnet50() -> dict[str, Variable]:
    """The trainable variables of ResNet-50 for 1,000 classes (He et al., CVPR 2016, table 1), with its batch norms."""
    shapes: list[tuple[int, ...]] = []

    def convolution(size: int, inputs: int, outputs: int) -> None:
        shapes.extend([(size, size, inputs, outputs), (outputs,), (outputs,)])  # kernel, gamma, beta

    convolution(7, 3, 64)
    inputs = 64
    for blocks, width in zip((3, 4, 6, 3), (64, 128, 256, 512), strict=True):
        for block in range(blocks):
            convolution(1, inputs, width)
            convolution(3, width, width)
            convolution(1, width, 4 * width)
            if block == 0:
                convolution(1, inputs, 4 * width)
            inputs = 4 * width
    shapes.extend([(2048, 1000), (1000,)])
    return {f"variable_{index}": Variable(shape) for index, shape in enumerate(shapes)}


def test_resnet50_is_even_on_three_servers() -> None:
    job = resnet50()
    assert len(job) == 161
    assert sum(math.prod(variable.shape) for variable in job.values()) == 25_557_032
    layouts = plan_shards(job, default_shards(3, job.values()))
    assert len(layouts) == 48
    servers = [Candidate(f"server-{i}", f"host-{i}:1", 0) for i in range(3)]
    placement = Placement("resnet", 1, job, assign_shards(layouts, servers))
    even = 4 * 25_557_032 / 3
    for shards in placement.by_server().values():
        assert sum(shard.layout.nbytes for shard in shards) == pytest.approx(even, rel=0.1)


@pytest.mark.parametrize(
    ("rows", "partitioner", "shards"),
    [
        (SMALL_JOB_BYTES // 8, None, 1),
        (SMALL_JOB_BYTES // 8 + 1, None, 3),
        (SMALL_JOB_BYTES // 8, FixedShards(3), 3),
        (1, None, 1),
    ],
)
def test_a_small_job_gets_one_shard_unless_it_is_partitioned(
    rows: int, partitioner: FixedShards | None, shards: int
) -> None:
    job = {"v": Variable((rows,), partitioner=partitioner), "w": Variable((SMALL_JOB_BYTES // 8,))}
    assert default_shards(3, job.values()) == shards


def test_no_shards_are_refused() -> None:
    with pytest.raises(errors.InvalidJob, match="shards is 0; use 1 or more"):
        plan_shards({"v": Variable(3)}, 0)


def test_no_servers_are_refused() -> None:
    with pytest.raises(errors.NotPlaced, match="there is no live server to place shards on"):
        assign_shards(plan_shards({"v": Variable(3)}, 1), [])


# Decoding refuses what does not fit.


def message() -> tensor_pb2.Placement:
    job = {"w": Variable((6, 2), partitioner=FixedShards(2)), "b": Variable(4)}
    return Placement("job", 1, job, assign_shards(plan_shards(job, 1), [Candidate("s", "s:1", 0)])).to_proto()


def arena_of(placement: tensor_pb2.Placement) -> tensor_pb2.ArenaLayout:
    return placement.shards[0].layout.arenas[0]


def move(placement: tensor_pb2.Placement) -> None:
    arena_of(placement).slices[1].offset += 1


def overrun(placement: tensor_pb2.Placement) -> None:
    arena_of(placement).slices[1].row_stop = 7


def empty_slice(placement: tensor_pb2.Placement) -> None:
    arena_of(placement).slices[1].row_stop = 3


def stranger(placement: tensor_pb2.Placement) -> None:
    arena_of(placement).slices[2].variable = "c"


def other_dtype(placement: tensor_pb2.Placement) -> None:
    arena_of(placement).dtype = tensor_pb2.FLOAT64


def no_dtype(placement: tensor_pb2.Placement) -> None:
    arena_of(placement).dtype = tensor_pb2.DTYPE_UNSPECIFIED


def exact_on_the_wire(placement: tensor_pb2.Placement) -> None:
    arena_of(placement).wire_dtype = tensor_pb2.FLOAT32


def wide_on_the_wire(placement: tensor_pb2.Placement) -> None:
    arena_of(placement).wire_dtype = tensor_pb2.FLOAT64


def unknown_on_the_wire(placement: tensor_pb2.Placement) -> None:
    arena_of(placement).ClearField("wire_dtype")
    arena_of(placement).MergeFromString(b"\x20\x63")  # field 4: 99


def rounded_sum(placement: tensor_pb2.Placement) -> None:
    for variable in placement.variables:
        variable.aggregation = tensor_pb2.SUM
    arena_of(placement).aggregation = tensor_pb2.SUM
    arena_of(placement).wire_dtype = tensor_pb2.BFLOAT16


def rounded_mean(placement: tensor_pb2.Placement) -> None:
    for variable in placement.variables:
        variable.aggregation = tensor_pb2.MEAN
    arena_of(placement).aggregation = tensor_pb2.MEAN
    arena_of(placement).wire_dtype = tensor_pb2.FLOAT16


def no_slices(placement: tensor_pb2.Placement) -> None:
    del arena_of(placement).slices[:]


def missing(placement: tensor_pb2.Placement) -> None:
    del arena_of(placement).slices[2:]


def missing_end(placement: tensor_pb2.Placement) -> None:
    arena_of(placement).slices[2].row_stop = 3


def twice(placement: tensor_pb2.Placement) -> None:
    placement.shards.add().CopyFrom(placement.shards[0])
    placement.shards[1].layout.shard = 1


def whole_twice(placement: tensor_pb2.Placement) -> None:
    twice(placement)
    again = placement.shards[1].layout.arenas[0].slices
    del again[:]
    again.add(variable="b", row_start=0, row_stop=4, offset=0)


def whole_and_part(placement: tensor_pb2.Placement) -> None:
    whole_twice(placement)
    placement.shards[1].layout.arenas[0].slices[0].row_start = 2


def numbered(placement: tensor_pb2.Placement) -> None:
    placement.shards[0].layout.shard = 5


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (
            move,
            "rows [3, 6) of variable 'w' of shape (6, 2) are placed at element 7 of their arena, after 6 others; "
            "slices must be rows of their variable, in order and without gaps",
        ),
        (overrun, "rows [3, 7) of variable 'w' of shape (6, 2)"),
        (empty_slice, "rows [3, 3) of variable 'w' of shape (6, 2)"),
        (stranger, "variable 'c' lies in an arena of float32 and TRAINABLE, but the job has no such variable"),
        (other_dtype, "variable 'w' lies in an arena of float64 and TRAINABLE, but the job has no such variable"),
        (no_dtype, "an arena's dtype or aggregation is missing or unknown"),
        (exact_on_the_wire, "an arena of float32 and TRAINABLE cannot have the wire dtype float32; only TRAINABLE"),
        (wide_on_the_wire, "an arena of float32 and TRAINABLE cannot have the wire dtype float64"),
        (unknown_on_the_wire, "an arena's wire dtype is unknown"),
        (rounded_sum, "an arena of float32 and SUM cannot have the wire dtype bfloat16"),
        (rounded_mean, "an arena of float32 and MEAN cannot have the wire dtype float16"),
        (no_slices, "an arena has no slices"),
        (missing, "the rows of variable 'b' of shape (4,) are placed as []; each row must lie in exactly one place"),
        (
            missing_end,
            "the rows of variable 'b' of shape (4,) are placed as [(0, 3)]; each row must lie in exactly one place",
        ),
        (twice, "the rows of variable 'w' of shape (6, 2) are placed as [(0, 3), (0, 3), (3, 6), (3, 6)]"),
        (whole_twice, "the rows of variable 'b' of shape (4,) are placed as [(0, 4), (0, 4)]; each row must lie in"),
        (whole_and_part, "the rows of variable 'b' of shape (4,) are placed as [(0, 4), (2, 4)]; each row must lie in"),
        (numbered, "the shards are numbered [5]; number them from 0, in order"),
    ],
)
def test_damaged_placements_are_refused(damage: Callable[[tensor_pb2.Placement], None], complaint: str) -> None:
    placement = message()
    Placement.from_proto(placement)
    damage(placement)
    with pytest.raises(errors.BadRequest) as raised:
        Placement.from_proto(placement)
    assert raised.value.message.startswith(complaint)


def test_arenas_are_kept_apart() -> None:
    job = {
        "kernel": Variable((2, 2)),
        "mean": Variable(2, trainable=False, aggregation="mean"),
        "half": Variable(2, "bfloat16"),
        "bias": Variable(2),
    }
    (layout,) = plan_shards(job, 1)
    assert [(arena.dtype.name, arena.aggregation, arena.elements) for arena in layout.arenas] == [
        ("float32", Aggregation.TRAINABLE, 6),
        ("float32", Aggregation.MEAN, 2),
        ("bfloat16", Aggregation.TRAINABLE, 2),
    ]
    assert [piece.variable for piece in layout.arenas[0].slices] == ["kernel", "bias"]
    assert layout.nbytes == 36
    assert layout.arenas[0].dtype == np.float32


EVERY_KIND = {
    "kernel": Variable(256),
    "mean": Variable(256, trainable=False, aggregation="mean"),
    "count": Variable(256, trainable=False, aggregation="sum"),
    "last": Variable(256, trainable=False, aggregation="last"),
    "wide": Variable(256, "float64"),
    "half": Variable(256, "float16"),
    "brain": Variable(256, "bfloat16"),
    "steps": Variable(256, "int64", trainable=False, aggregation="sum"),
}


@pytest.mark.parametrize("wire", ["bfloat16", "float16"])
def test_a_job_chooses_the_wire_dtype_of_trainable_float32(wire: str) -> None:
    (layout,) = plan_shards(EVERY_KIND, 1, np.dtype(wire))
    travels = {arena.slices[0].variable: arena.wire_dtype.name for arena in layout.arenas}
    assert travels == {
        "kernel": wire,
        "mean": "float32",
        "count": "float32",
        "last": "float32",
        "wide": "float64",
        "half": "float16",
        "brain": "bfloat16",
        "steps": "int64",
    }
    assert {arena.slices[0].variable: arena.nbytes for arena in layout.arenas}["kernel"] == 512
    assert [arena.dtype for arena in layout.arenas][:2] == [np.float32, np.float32]


@pytest.mark.parametrize("wire", [None, np.dtype(np.float32)])
def test_without_a_choice_all_travels_as_it_is(wire: np.dtype | None) -> None:
    (layout,) = plan_shards(EVERY_KIND, 1, wire)
    assert all(arena.wire_dtype == arena.dtype for arena in layout.arenas)
    assert all(arena.wire_dtype == tensor_pb2.DTYPE_UNSPECIFIED for arena in layout.to_proto().arenas)


def test_a_choice_survives_the_wire_and_shares_bytes_out_as_they_travel() -> None:
    job = {"kernel": Variable(1024), "bias": Variable(256), "count": Variable(512, trainable=False, aggregation="sum")}
    layouts = plan_shards(job, 2, np.dtype("bfloat16"))
    assert sorted(layout.nbytes for layout in layouts) == [2048, 2560]
    placement = Placement("job", 1, job, assign_shards(layouts, [Candidate("s", "s:1", 0)]))
    assert Placement.from_proto(placement.to_proto()) == placement


def test_an_arena_without_wire_dtype_travels_unchanged() -> None:
    arena = ArenaLayout(np.dtype(np.float64), Aggregation.TRAINABLE, (), 3)
    assert (arena.wire_dtype, arena.nbytes) == (np.dtype(np.float64), 24)


def test_one_server_is_the_previous_one_or_that_with_the_fewest_bytes() -> None:
    servers = [Candidate("a", "h:1", 9), Candidate("b", "h:2", 5), Candidate("c", "h:3", 5)]
    assert candidates_for_one_server(servers) == [servers[1]]
    assert candidates_for_one_server(servers, ["a", "a"]) == [servers[0]]
    assert candidates_for_one_server(servers, ["gone"]) == [servers[1]]
