"""Base class of the layers whose variables are split over the devices of a mesh."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.keras.layers.core_layer import CoreLayer, WeightArguments
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.replica_context import current_replica
from shoal_distribute.tensor_parallel import DeviceMesh, SplitArray, SplitPlace, group_of_devices, part_bounds
from shoal_distribute.values import DistributedVariable


class SplitLayer(CoreLayer):
    """Base class of layers that several devices compute together, each with a part of the variables.

    A call uses no state but the variables: what its backward pass needs belongs to the call.

    Args:
        found: see `CoreLayer`.
        mesh: the devices. Along other axes than `axis`, it has one device each.
        axis: the axis of the mesh whose devices share the layer.
        **kwargs: see `Layer`.

    Raises:
        BadRequest: the mesh has no such axis, or several groups along it.
        DeviceUnavailable: there is no such device.
    """

    # By its name in shoal_nn, the axis of each variable that is split.
    split_axes: ClassVar[Mapping[str, int]]

    def __init__(
        self,
        found: Mapping[str, WeightArguments],
        mesh: DeviceMesh | Mapping[str, Any],
        axis: str,
        /,
        **kwargs: Any,
    ) -> None:
        super().__init__(found, **kwargs)
        self.mesh = DeviceMesh.of(mesh)
        self._group = group_of_devices([str(it) for it in self.mesh.only_group(axis)])

    @property
    def home(self) -> LogicalDevice:
        """The device of whole arrays: that of the replica that runs, otherwise the first one of the strategy."""
        replica = current_replica()
        return replica.device if replica else self.strategy.devices[0]

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "mesh": self.mesh.description()}

    def create_variable(self, name: str, full: str, values: np.ndarray, /, *, trainable: bool) -> DistributedVariable:
        if name not in self.split_axes:
            return super().create_variable(name, full, values, trainable=trainable)
        place = SplitPlace(self._group, self.split_axes[name])
        return self.strategy.create_split_variable(full, values, trainable=trainable, place=place)

    def parts_of(self, name: str) -> Sequence[Array | None]:
        """Returns the parts of a variable, each on its device; None for each device if the layer does not have it.

        Args:
            name: its name in shoal_nn.
        """
        if name not in self._variables:
            return [None] * len(self._group.devices)
        parts: Sequence[Array] = self._variables[name].storage().parts
        return parts

    def gradients(self, found: Sequence[Mapping[str, Array]]) -> list[Array]:
        """Returns the gradients of the trained variables from those of their parts, in the order of the variables.

        Args:
            found: gradients of each device by name.
        """
        return [
            SplitArray(self._group, self.split_axes[name], [it[name] for it in found])
            for name in self.trained_variables()
            if name in self.split_axes
        ]

    def check_width(self, x: Tensor, width: int) -> None:
        """Raises InvalidShape unless the last axis of a batch has this length.

        Args:
            x: the batch.
            width: the length.
        """
        if x.ndim < 2 or x.shape[-1] != width:
            raise errors.InvalidShape(
                f"layer {self.name} got samples of the shape {x.shape[1:]}, but was built for (..., {width}); reshape "
                "the samples, or make another layer"
            )

    def check_split(self, length: int, what: str) -> None:
        """Raises InvalidShape if there are fewer elements than devices.

        Args:
            length: number of elements.
            what: what they are, in words.
        """
        part_bounds(length, len(self._group.devices), f"{what} of layer {self.name}")


__all__ = ["SplitLayer"]
