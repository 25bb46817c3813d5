"""Placements: their encoded form, and what it costs to change the servers of one."""

from dataclasses import replace

import pytest

from shoal._wire import Placement
from shoal.v1 import tensor_pb2
from shoal.variables import Variable
from shoal_coordinator.cluster import Candidate, assign_shards, plan_shards


def placement(variables: int, shards: int) -> Placement:
    described = {f"layer{number}/kernel": Variable((number + 1, 40)) for number in range(variables)}
    servers = [Candidate("s0", "h:1", 0), Candidate("s1", "h:2", 0)]
    return Placement("a", 3, described, assign_shards(plan_shards(described, shards), servers))


@pytest.mark.parametrize(("variables", "shards"), [(1, 1), (3, 2), (300, 2), (500, 7)])
def test_the_encoded_form_is_that_of_the_whole_message(variables: int, shards: int) -> None:
    found = placement(variables, shards)
    backed_up = tuple(
        replace(shard, backup="s2", backup_address="h:3", term=300, group=shard.layout.shard) for shard in found.shards
    )
    for it in (found, replace(found, shards=backed_up)):
        message = tensor_pb2.Placement(
            job="a",
            generation=3,
            variables=[variable.to_proto(name) for name, variable in it.variables.items()],
            shards=[shard.to_proto() for shard in it.shards],
        )
        assert it.encoded == message.SerializeToString(deterministic=True)
        assert Placement.from_proto(it.to_proto()) == it


def test_another_server_does_not_encode_the_layouts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = placement(30, 4)
    assert found.encoded
    moved = replace(found, shards=tuple(replace(shard, server="s9", term=1) for shard in found.shards))
    monkeypatch.setattr("shoal._wire.layout.ShardLayout.to_proto", None)
    assert moved.encoded != found.encoded
