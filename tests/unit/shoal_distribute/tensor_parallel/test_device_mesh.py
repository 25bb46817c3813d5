"""Device meshes: coordinates, groups, submeshes, and axes that do not fit the devices; bounds of split axes."""

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal_distribute import DeviceMesh
from shoal_distribute.tensor_parallel import part_bounds

GPUS = [f"/gpu:{number}" for number in range(8)]


def test_the_last_axis_varies_fastest() -> None:
    mesh = DeviceMesh({"data": 2, "model": 4}, GPUS)
    assert mesh.coordinates("/gpu:5") == {"data": 1, "model": 1}
    assert mesh.group_of("/gpu:5", "model") == ("/gpu:4", "/gpu:5", "/gpu:6", "/gpu:7")
    assert mesh.group_of("/gpu:5", "data") == ("/gpu:1", "/gpu:5")
    assert mesh.submesh(data=1) == DeviceMesh({"model": 4}, GPUS[4:])
    assert mesh.submesh(model=2) == DeviceMesh({"data": 2}, ["/gpu:2", "/gpu:6"])
    assert (mesh.size, mesh.length("model")) == (8, 4)


def test_a_mesh_of_ranks_has_stages_and_replicas() -> None:
    mesh = DeviceMesh({"stage": 2, "data": 2}, range(4))
    assert mesh.groups("data") == ((0, 1), (2, 3))
    assert mesh.groups("stage") == ((0, 2), (1, 3))
    assert mesh.submesh(stage=1).only_group("data") == (2, 3)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_groups_along_an_axis_divide_the_devices(lengths: list[int]) -> None:
    axes = {f"axis{number}": length for number, length in enumerate(lengths)}
    mesh = DeviceMesh(axes, range(int(np.prod(lengths))))
    places = [tuple(mesh.coordinates(device).values()) for device in mesh.devices]
    assert places == [*product(*map(range, lengths))]
    for axis, length in axes.items():
        groups = mesh.groups(axis)
        assert sorted(device for group in groups for device in group) == list(mesh.devices)
        for group in groups:
            assert [mesh.coordinates(device)[axis] for device in group] == [*range(length)]
            rest = [{**mesh.coordinates(device), axis: 0} for device in group]
            assert all(it == rest[0] for it in rest)
    assert DeviceMesh.of(mesh.description()) == mesh


@pytest.mark.parametrize(
    ("axes", "devices", "message"),
    [
        ({}, [], "give names with lengths of 1 or more"),
        ({"model": 0}, [], "give names with lengths of 1 or more"),
        ({"model": "2"}, GPUS[:2], "the axes of a mesh are {'model': '2'}; give names with lengths of 1 or more"),
        ({"model": 2.0}, GPUS[:2], "give names with lengths of 1 or more"),
        ({"data": 2, "model": 4}, GPUS[:6], "data=2 x model=4 has 8 points, but 6 devices are given"),
        ({"model": 2}, "/gpu:0", "model=2 has 2 points, but 1 devices are given"),
        ({"model": 2}, ["/gpu:0", "/gpu:0"], "has /gpu:0 more than once"),
    ],
)
def test_axes_must_fit_the_devices(axes: dict[str, Any], devices: list[str], message: str) -> None:
    with pytest.raises(errors.BadRequest, match=message):
        DeviceMesh(axes, devices)


def test_unknown_places_are_named() -> None:
    mesh = DeviceMesh({"data": 2, "model": 4}, GPUS)
    with pytest.raises(errors.BadRequest, match="has no axis 'stage'; it has data, model"):
        mesh.groups("stage")
    with pytest.raises(errors.BadRequest, match="has no '/gpu:9'; it has /gpu:0, "):
        mesh.coordinates("/gpu:9")
    with pytest.raises(errors.BadRequest, match="has the numbers 0 to 1, not 2"):
        mesh.submesh(data=2)
    with pytest.raises(errors.BadRequest, match=r"2 groups along 'model'; choose one, such as mesh.submesh\(data=0\)"):
        mesh.only_group("model")
    with pytest.raises(errors.BadRequest, match="a mesh is 4; give DeviceMesh"):
        DeviceMesh.of(4)  # type: ignore[arg-type]


@given(st.integers(1, 12), st.integers(0, 40))
def test_parts_differ_by_at_most_one_element(devices: int, more: int) -> None:
    bounds = part_bounds(devices + more, devices)
    lengths = [it.stop - it.start for it in bounds]
    assert [number for it in bounds for number in range(it.start, it.stop)] == [*range(devices + more)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] - lengths[-1] in (0, 1)


def test_fewer_elements_than_devices_are_refused() -> None:
    with pytest.raises(errors.InvalidShape, match="the output has 3 elements, too few to be split over 4 devices"):
        part_bounds(3, 4, "the output")
