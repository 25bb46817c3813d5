"""Embedding whose rows are split over several devices (Megatron-LM)."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import shoal_nn
from shoal import errors
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.keras.layers.core_layer import WeightArguments
from shoal_distribute.keras.layers.split_layer import SplitLayer
from shoal_distribute.keras.tensor import Tensor, recorded
from shoal_distribute.tensor_parallel import DeviceMesh, rows_of_part


class ParallelEmbedding(SplitLayer):
    """`Embedding` layer whose rows are split: each device looks up the ids of its rows, and the vectors are added.

    It computes what `Embedding` computes, with the same bits, and has the same variable and initial values. If the
    devices do not divide the rows, the first ones have one row more.

    Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism", 2019.

    Args:
        input_dim: number of rows, at least the number of devices. Ids are in [0, input_dim); other ids are refused.
        output_dim: length of a vector.
        embeddings_initializer: name or object.
        mesh: the devices. Along other axes than `axis`, it has one device each. Or the `mesh` of a
            `MultiWorkerPipelineStrategy`.
        axis: the axis of the mesh whose devices or ranks share the layer.
        **kwargs: see `Layer`.

    Raises:
        BadRequest: the mesh has no such axis, or several groups along it.
        InvalidShape: there are fewer rows than devices.
    """

    split_axes: ClassVar[Mapping[str, int]] = {"table": 0}
    weight_names: ClassVar[Mapping[str, str]] = {"table": "embeddings"}
    takes_integers = True

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        *,
        mesh: DeviceMesh | Mapping[str, Any],
        axis: str = "model",
        **kwargs: Any,
    ) -> None:
        super().__init__({"table": WeightArguments(embeddings_initializer)}, mesh, axis, **kwargs)
        self._layer = shoal_nn.Embedding(input_dim, output_dim)
        self.check_split(input_dim, "the table")

    def core(self) -> shoal_nn.Layer:
        return self._layer

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:  # noqa: ARG002 - acts the same
        ids, group = inputs.array, self._group
        if ids.dtype.kind not in "iu":
            ids = ids.astype("int32")
        self._check_ids(ids)
        table = self._variables["table"].storage()

        def forward(device: LogicalDevice, part: Array, rows: slice) -> tuple[Array, Callable[[Array], Array]]:
            return rows_of_part(part, rows.start, device.put(ids))

        outputs = group.map(forward, table.parts, table.bounds)
        pulls = [pull for _, pull in outputs]

        def pullback(dy: Array) -> list[Array | None]:
            found = group.map(lambda device, pull: {"table": pull(device.put(dy))}, pulls)
            return [None, *self.gradients(found)]

        y = group.total(self.home, [y for y, _ in outputs])
        return recorded(y, (inputs, *self.trained_variables().values()), pullback)

    def _check_ids(self, ids: Array) -> None:
        """Raises InvalidData if a row does not exist: no device has it, so its vector would be 0."""
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._layer.rows:
            raise errors.InvalidData(
                f"layer {self.name} got ids from {int(ids.min())} to {int(ids.max())}, but its rows are 0 to "
                f"{self._layer.rows - 1}; map other ids to rows before, or give a larger input_dim"
            )


__all__ = ["ParallelEmbedding"]
