"""Base class of the layers whose variables are split over the devices or the ranks of a mesh."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from shoal import errors
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.keras.layers.core_layer import CoreLayer, WeightArguments
from shoal_distribute.keras.tensor import Tensor
from shoal_distribute.replica_context import current_replica
from shoal_distribute.tensor_parallel import DeviceMesh, SplitPlace, part_bounds
from shoal_distribute.values import DistributedVariable


class SplitLayer(CoreLayer):
    """Base class of layers that several devices or ranks compute together, each with a part of the variables.

    A call uses no state but the variables: what its backward pass needs belongs to the call.

    Args:
        found: see `CoreLayer`.
        mesh: the devices. Along other axes than `axis`, it has one device each. Or the ranks: the `mesh` of a
            `MultiWorkerPipelineStrategy`, in whose scope the layer is made.
        axis: the axis of the mesh whose devices or ranks share the layer.
        **kwargs: see `Layer`.

    Raises:
        BadRequest: the mesh has no such axis, or several groups of devices along it, or it has ranks of another
            strategy.
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
        self._group = self.strategy.part_group(self.mesh, axis)

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
        """Returns this process's parts of a variable, each on its device; None for each if the layer does not have it.

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
            variable.storage().with_parts([it[name] for it in found])
            for name, variable in self.trained_variables().items()
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
        """Raises InvalidShape if there are fewer elements than parts.

        Args:
            length: number of elements.
            what: what they are, in words.
        """
        over = "devices" if len(self._group.devices) == self._group.size else "ranks"
        part_bounds(length, self._group.size, f"{what} of layer {self.name}", over)


__all__ = ["SplitLayer"]
