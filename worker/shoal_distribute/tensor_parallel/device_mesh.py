"""Device mesh: devices or ranks at the points of a grid, whose axes have names."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Self

import numpy as np

from shoal import errors

# The name of a device, such as "/gpu:0", or the number of a rank.
MeshMember = str | int


@dataclass(frozen=True)
class DeviceMesh:
    """A grid of devices or of ranks. It says which of them work together, along which axis.

        mesh = DeviceMesh({"data": 2, "model": 4}, [f"/gpu:{number}" for number in range(8)])
        mesh.coordinates("/gpu:5")              # {"data": 1, "model": 1}
        mesh.group_of("/gpu:5", "model")        # ("/gpu:4", "/gpu:5", "/gpu:6", "/gpu:7")
        mesh.submesh(data=1)                    # a mesh of these four, with the axis "model" alone

    The members fill the grid in order, and the last axis varies fastest. A mesh has no devices of its own and starts
    nothing: processes that make the same mesh agree about it.

    Args:
        axes: length of each axis by its name, such as "stage", "data" or "model".
        devices: one for each point of the grid: names of devices, or numbers of ranks.

    Raises:
        BadRequest: an axis has no length of 1 or more, or the devices do not fit the axes.
    """

    axes: Mapping[str, int]
    devices: Sequence[MeshMember]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axes", dict(self.axes))
        object.__setattr__(self, "devices", (self.devices,) if isinstance(self.devices, str) else tuple(self.devices))
        if not self.axes or not all(map(_is_length, self.axes.values())):
            raise errors.BadRequest(
                f"the axes of a mesh are {self.axes}; give names with lengths of 1 or more, such as {{'model': 2}}"
            )
        if len(self.devices) != self.size:
            raise errors.BadRequest(
                f"a mesh of {self._shown()} has {self.size} points, but {len(self.devices)} devices are given; give a "
                "device for each point, or other lengths"
            )
        if twice := sorted({str(it) for it in self.devices if self.devices.count(it) > 1}):
            raise errors.BadRequest(f"a mesh has {', '.join(twice)} more than once; give each device once")

    @classmethod
    def of(cls, given: "DeviceMesh | Mapping[str, Any]") -> Self:
        """Returns a mesh, or the one of a `description`.

        Args:
            given: a mesh, or what `description` returned.

        Raises:
            BadRequest: it is something else.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, Mapping) and {*given} == {"axes", "devices"}:
            return cls(given["axes"], given["devices"])
        raise errors.BadRequest(f"a mesh is {given!r}; give DeviceMesh({{'model': 2}}, ['/cpu:0', '/cpu:1'])")

    @property
    def size(self) -> int:
        """The number of points."""
        return int(np.prod([*self.axes.values()]))

    def description(self) -> dict[str, Any]:
        """Returns what `of` makes the same mesh from, for files."""
        return {"axes": dict(self.axes), "devices": list(self.devices)}

    def length(self, axis: str) -> int:
        """Returns the length of an axis.

        Raises:
            BadRequest: there is no such axis.
        """
        return self.axes[self._known(axis)]

    def coordinates(self, device: MeshMember) -> dict[str, int]:
        """Returns the place of a device: its number along each axis.

        Raises:
            BadRequest: the mesh does not have it.
        """
        if device not in self.devices:
            raise errors.BadRequest(f"a mesh of {self._shown()} has no {device!r}; it has {self._listed()}")
        place = np.unravel_index(self.devices.index(device), tuple(self.axes.values()))
        return {axis: int(number) for axis, number in zip(self.axes, place, strict=True)}

    def groups(self, axis: str) -> tuple[tuple[MeshMember, ...], ...]:
        """Returns the groups along an axis: the devices of a group differ in this coordinate alone.

        Raises:
            BadRequest: there is no such axis.
        """
        along = [*self.axes].index(self._known(axis))
        lines = np.moveaxis(self._grid(), along, -1).reshape(-1, self.axes[axis])
        return tuple(tuple(self.devices[number] for number in line) for line in lines)

    def group_of(self, device: MeshMember, axis: str) -> tuple[MeshMember, ...]:
        """Returns the group of a device along an axis, itself included.

        Args:
            device: the device.
            axis: name of the axis.

        Raises:
            BadRequest: the mesh does not have the device or the axis.
        """
        self.coordinates(device)
        return next(group for group in self.groups(axis) if device in group)

    def submesh(self, **coordinates: int) -> "DeviceMesh":
        """Returns the mesh of the devices with these coordinates, with the other axes.

        Args:
            **coordinates: a number along each axis that the submesh does not have.

        Raises:
            BadRequest: there is no such axis or number, or no axis is left.
        """
        for axis, number in coordinates.items():
            if not 0 <= number < self.length(axis):
                raise errors.BadRequest(
                    f"axis {axis!r} of a mesh has the numbers 0 to {self.axes[axis] - 1}, not {number}"
                )
        kept = {axis: length for axis, length in self.axes.items() if axis not in coordinates}
        chosen = self._grid()[tuple(coordinates.get(axis, slice(None)) for axis in self.axes)]
        return DeviceMesh(kept, [self.devices[number] for number in np.ravel(chosen)])

    def only_group(self, axis: str) -> tuple[MeshMember, ...]:
        """Returns the group along an axis, if the mesh has a single one.

        Raises:
            BadRequest: there is no such axis, or there are several groups.
        """
        groups = self.groups(axis)
        if len(groups) > 1:
            others = ", ".join(f"{other}=0" for other, length in self.axes.items() if other != axis and length > 1)
            raise errors.BadRequest(
                f"a mesh of {self._shown()} has {len(groups)} groups along {axis!r}; choose one, such as "
                f"mesh.submesh({others})"
            )
        return groups[0]

    def _grid(self) -> np.ndarray:
        return np.arange(self.size).reshape(tuple(self.axes.values()))

    def _known(self, axis: str) -> str:
        if axis not in self.axes:
            raise errors.BadRequest(f"a mesh of {self._shown()} has no axis {axis!r}; it has {', '.join(self.axes)}")
        return axis

    def _shown(self) -> str:
        return " x ".join(f"{axis}={length}" for axis, length in self.axes.items())

    def _listed(self) -> str:
        shown = ", ".join(map(str, self.devices[:8]))
        return f"{shown} and {len(self.devices) - 8} more" if len(self.devices) > 8 else shown


def _is_length(given: object) -> bool:
    if isinstance(given, bool) or not isinstance(given, Integral):
        return False
    return int(given) >= 1


__all__ = ["DeviceMesh", "MeshMember"]
