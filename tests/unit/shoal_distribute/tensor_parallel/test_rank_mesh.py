"""The mesh of ranks: which stage, replica and part each rank computes, and with which ranks."""

from typing import Any

import pytest

from shoal import errors
from shoal_distribute import DeviceMesh, RankMesh


def test_each_rank_has_a_place() -> None:
    mesh = RankMesh(stages=2, replicas=2, split=3)
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(12)]
    assert places == [(replica, stage, part) for replica in (0, 1) for stage in (0, 1) for part in (0, 1, 2)]
    assert mesh.coordinates(7) == {"replica": 1, "stage": 0, "model": 1}


@pytest.mark.parametrize("sizes", [(1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1), (3, 2, 4)])
def test_ranks_of_a_group_differ_in_one_coordinate(sizes: tuple[int, int, int]) -> None:
    mesh = RankMesh(*sizes)
    groups = {"stage": mesh.line, "replica": mesh.peers, "model": mesh.split_group}
    for rank in range(mesh.size):
        for axis, group_of in groups.items():
            ranks = group_of(rank)
            assert [mesh.coordinates(it) for it in ranks] == [
                {**mesh.coordinates(rank), axis: number} for number in range(mesh.length(axis))
            ]
            assert all(group_of(it) == ranks for it in ranks)
        assert mesh.split_group(rank) == tuple(range(min(mesh.split_group(rank)), max(mesh.split_group(rank)) + 1))


def test_a_rank_is_described_by_its_place() -> None:
    assert RankMesh(2, 2).described(3) == "stage 1 of replica 1"
    assert RankMesh(2, 2, 2).described(5) == "part 1 of stage 0 of replica 1"


def test_a_mesh_of_ranks_is_one_of_devices() -> None:
    mesh = RankMesh(2, 1, 2)
    assert DeviceMesh.of(mesh) is mesh
    assert DeviceMesh.of(mesh.description()).group_of(3, "model") == (2, 3)


def test_other_numbers_of_ranks_are_refused() -> None:
    RankMesh(2, 3).check_ranks(6)
    with pytest.raises(
        errors.BadRequest, match=r"3 processes, but 2 stages with 1 replicas need 2; .* stage of each rep"
    ):
        RankMesh(2).check_ranks(3)
    with pytest.raises(
        errors.BadRequest, match=r"2 stages with 1 replicas .each stage split over 2 ranks. need 4; .* each part"
    ):
        RankMesh(2, 1, 2).check_ranks(3)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((2, 1, 0), "split is 0; it must be a whole number, 1 or more"),
        ((2, 0), "replicas is 0; it must be"),
        ((2.0, 1), r"stages is 2\.0; it must be"),
        ((None,), "stages is None; it must be"),
    ],
)
def test_wrong_numbers_are_named_as_the_arguments_are(sizes: Any, message: str) -> None:
    with pytest.raises(errors.BadRequest, match=message):
        RankMesh(*sizes)
