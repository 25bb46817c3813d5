"""Lock groups of a placement, and the servers that hold their copies."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal._wire import Packer, Placement, ShardPlacement, with_groups
from shoal.partitioners import FixedShards
from shoal.v1 import tensor_pb2
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards

VARIABLES = {"w": Variable((8, 4), partitioner=FixedShards(8))}
LAYOUTS = plan_shards(VARIABLES, 8)


def placed_on(servers: list[int]) -> Placement:
    shards = (
        ShardPlacement(layout, f"s{server}", f"host-{server}:1")
        for layout, server in zip(LAYOUTS, servers, strict=True)
    )
    return Placement("job", 1, VARIABLES, with_groups(shards))


@given(st.lists(st.integers(0, 3), min_size=8, max_size=8))
def test_shards_of_a_server_form_a_group_named_by_the_smallest(servers: list[int]) -> None:
    groups = placed_on(servers).by_group()
    assert sorted(shard.layout.shard for shards in groups.values() for shard in shards) == list(range(8))
    for name, shards in groups.items():
        assert name == min(shard.layout.shard for shard in shards)
        assert len({shard.address for shard in shards}) == 1
    assert len(groups) == len(set(servers))


def test_groups_stay_apart_on_one_server() -> None:
    placement = placed_on([0, 1] * 4)
    moved = tuple(replace(shard, server="s0", address="host-0:1", term=1) for shard in placement.shards)
    together = replace(placement, shards=moved)
    assert {name: len(shards) for name, shards in together.by_group().items()} == {0: 4, 1: 4}
    assert len(together.by_server()) == 1
    assert [*Packer(together).groups] == [0, 1]
    assert Placement.from_proto(together.to_proto()) == together


def test_a_placement_keeps_its_copies_on_the_wire() -> None:
    placement = placed_on([0, 1] * 4)
    shards = tuple(
        replace(shard, backup="s2", backup_address="host-2:1", term=3) if shard.group == 1 else shard
        for shard in placement.shards
    )
    placement = replace(placement, shards=shards)
    assert Placement.from_proto(placement.to_proto()) == placement


def test_a_placement_without_groups_has_one_for_each_server() -> None:
    placement = placed_on([0, 1, 1, 0, 2, 2, 2, 2])
    message = placement.to_proto()
    for shard in message.shards:
        shard.ClearField("group")  # as earlier versions send it
    assert Placement.from_proto(message).by_group() == placement.by_group()
    assert Placement.from_proto(message).to_proto() == message


def test_a_group_of_shard_0_differs_from_no_group() -> None:
    message = placed_on([0] * 8).to_proto()
    assert [shard.HasField("group") for shard in message.shards] == [True] * 8


@pytest.mark.parametrize(
    "changed",
    [
        {"group": 3},
        {"group": 7},
        {"address": "host-1:2"},
        {"server": "s9"},
        {"backup": "s9"},
        {"term": 1},
    ],
)
def test_a_group_that_is_not_whole_is_refused(changed: dict[str, object]) -> None:
    message = placed_on([0, 1] * 4).to_proto()
    last = message.shards[6]
    for name, value in changed.items():
        setattr(last, name, value)
    with pytest.raises(errors.BadRequest, match="lock group"):
        Placement.from_proto(message)


def test_the_policy_needs_not_name_groups() -> None:
    assigned = assign_shards(LAYOUTS, [Candidate("a", "a:1", 0), Candidate("b", "b:1", 0)])
    assert {shard.group for shard in assigned} == {None}
    placement = Placement("job", 1, VARIABLES, assigned)
    assert set(placement.by_group()) == {0, 1}


def test_a_slim_message_has_servers_but_no_arenas() -> None:
    shard = replace(placed_on([0] * 8).shards[3], backup="s1", backup_address="host-1:1", term=2)
    slim = shard.to_slim_proto()
    assert slim.layout == tensor_pb2.ShardLayout(shard=3)
    assert ShardPlacement.of(shard.layout, slim) == shard
