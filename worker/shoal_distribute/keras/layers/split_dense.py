"""Dense layers that several devices compute together, split by their outputs or by their inputs (Megatron-LM)."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import shoal_nn
from shoal import errors
from shoal.program import Array
from shoal_distribute.devices import LogicalDevice
from shoal_distribute.keras import activations
from shoal_distribute.keras.layers.base import Shape, cast
from shoal_distribute.keras.layers.core_layer import WeightArguments, applied
from shoal_distribute.keras.layers.split_layer import SplitLayer
from shoal_distribute.keras.tensor import Tensor, is_recorded, recorded
from shoal_distribute.tensor_parallel import DeviceMesh, SplitArray, views_of
from shoal_nn.activations import Activation

# One device's forward pass: its output, and its pullback.
_Applied = tuple[Array, Callable[[Array], tuple[dict[str, Array], Array]]]


class _SplitDense(SplitLayer):
    """Base class of both dense layers.

    Args:
        core: the layer that is split.
        activation: name or function of the activation; None means none.
        kernel: name or object of the kernel's initializer.
        bias: name or object of the bias' initializer.
        mesh: see `SplitLayer`.
        axis: see `SplitLayer`.
        **kwargs: see `Layer`.
    """

    def __init__(
        self, core: shoal_nn.Dense, activation: Any, kernel: Any, bias: Any, mesh: Any, axis: str, /, **kwargs: Any
    ) -> None:
        super().__init__({"kernel": WeightArguments(kernel), "bias": WeightArguments(bias)}, mesh, axis, **kwargs)
        self._layer = core
        self._activation = activations.layer_of(activation)

    def core(self) -> shoal_nn.Layer:
        return self._layer

    def activated(self) -> shoal_nn.Layer | None:
        return self._activation

    def input_of(self, inputs: Tensor) -> Tensor:
        """Returns the input of a call in the layer's dtype.

        Raises:
            InvalidShape: the samples are not those that the layer was built for.
        """
        self.check_width(inputs, self._variables["kernel"].shape[0])
        return cast(inputs, self.dtype)


class ColumnParallelDense(_SplitDense):
    """`Dense` layer whose outputs are split: each device has some columns of the kernel, and their part of the bias.

        mesh = DeviceMesh({"model": 2}, ["/gpu:0", "/gpu:1"])
        hidden = ColumnParallelDense(4096, "gelu", mesh=mesh, gather_output=False)
        outputs = RowParallelDense(1024, mesh=mesh, input_is_parallel=True)

    It computes what `Dense` computes, and has the same variables and initial values. If the devices do not divide the
    outputs, the first ones have one column more.

    Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism", 2019.

    Args:
        units: length of the output's last axis, at least the number of devices.
        activation: as for `Dense`.
        use_bias: whether to add a bias.
        kernel_initializer: name or object.
        bias_initializer: name or object.
        mesh: the devices. Along other axes than `axis`, it has one device each. Or the `mesh` of a
            `MultiWorkerPipelineStrategy`.
        axis: the axis of the mesh whose devices or ranks share the layer.
        gather_output: whether the output is gathered on one device. Otherwise each device keeps its part, which a
            `RowParallelDense` with `input_is_parallel=True` takes. Any other layer gathers the parts.
        **kwargs: see `Layer`.

    Raises:
        BadRequest: the mesh has no such axis, or several groups along it.
        InvalidLayer: the activation needs all outputs (softmax), and they are not gathered.
        InvalidShape: there are fewer outputs than devices.
    """

    split_axes: ClassVar[Mapping[str, int]] = {"kernel": 1, "bias": 0}

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        *,
        mesh: DeviceMesh | Mapping[str, Any],
        axis: str = "model",
        gather_output: bool = True,
        **kwargs: Any,
    ) -> None:
        core = shoal_nn.Dense(units, bias=use_bias)
        super().__init__(core, activation, kernel_initializer, bias_initializer, mesh, axis, **kwargs)
        self._gathers = gather_output
        self.check_split(units, "the output")
        found = self._activation
        self._by_element = found if isinstance(found, Activation) else None
        if found is not self._by_element and not gather_output:
            raise errors.InvalidLayer(
                f"layer {self.name} has its outputs on several devices, but {type(found).__name__} needs all of them; "
                "give gather_output=True, or another activation",
                kind=type(self).__name__,
            )

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:  # noqa: ARG002 - acts the same
        x, group = self.input_of(inputs), self._group
        whole, home, is_data = x.array, self.home, not is_recorded(x)
        by_element = self._by_element

        def forward(device: LogicalDevice, kernel: Array, bias: Array | None) -> _Applied:
            core, arrays = shoal_nn.Dense(kernel.shape[1], bias=bias is not None), {"kernel": kernel, "bias": bias}
            y, _, pull = core.apply(arrays, {}, device.put(whole), False)
            if by_element is None:
                return y, pull
            activated, _, slope = by_element.apply({}, {}, y, False)
            return activated, lambda dy: pull(slope(dy)[1])

        outputs = group.map(forward, self.parts_of("kernel"), self.parts_of("bias"))
        split = SplitArray(group, -1, [y for y, _ in outputs], self._layer.units)
        pulls = [pull for _, pull in outputs]

        def pullback(dy: Array) -> list[Array | None]:
            own = views_of(dy, -1, group)
            found = group.map(lambda device, pull, part: pull(device.put(part)), pulls, own)
            dx = None if is_data else group.total(home, [it for _, it in found])
            return [dx, *self.gradients([gradients for gradients, _ in found])]

        value = split.gathered(home) if self._gathers else split
        output = recorded(value, (x, *self.trained_variables().values()), pullback)
        after = self._activation
        return output if after is None or after is by_element else applied(after, output)


class RowParallelDense(_SplitDense):
    """`Dense` layer whose inputs are split: each device has some rows of the kernel, and their products are added.

    It computes what `Dense` computes, up to the rounding of sums, and has the same variables and initial values. The
    bias is not split, and is added once. If the devices do not divide the inputs, the first ones have one row more.

    Shoeybi et al., "Megatron-LM: Training multi-billion parameter language models using model parallelism", 2019.

    Args:
        units: length of the output's last axis.
        activation: as for `Dense`.
        use_bias: whether to add a bias.
        kernel_initializer: name or object.
        bias_initializer: name or object.
        mesh: the devices. Along other axes than `axis`, it has one device each. Or the `mesh` of a
            `MultiWorkerPipelineStrategy`.
        axis: the axis of the mesh whose devices or ranks share the layer.
        input_is_parallel: whether the input is in parts on the same devices, as a `ColumnParallelDense` with
            `gather_output=False` leaves it. Otherwise a whole input is split.
        **kwargs: see `Layer`.

    Raises:
        BadRequest: the mesh has no such axis, or several groups along it.
        InvalidShape: there are fewer inputs than devices.
    """

    split_axes: ClassVar[Mapping[str, int]] = {"kernel": 0}

    def __init__(
        self,
        units: int,
        activation: Any = None,
        use_bias: bool = True,
        kernel_initializer: Any = "glorot_uniform",
        bias_initializer: Any = "zeros",
        *,
        mesh: DeviceMesh | Mapping[str, Any],
        axis: str = "model",
        input_is_parallel: bool = False,
        **kwargs: Any,
    ) -> None:
        core = shoal_nn.Dense(units, bias=use_bias)
        super().__init__(core, activation, kernel_initializer, bias_initializer, mesh, axis, **kwargs)
        self._takes_parts = input_is_parallel

    def build(self, shape: Shape) -> None:
        self._layer.output_shape(shape)
        self.check_split(shape[-1], "the input")
        super().build(shape)

    def call(self, inputs: Tensor, training: bool = False) -> Tensor:  # noqa: ARG002 - acts the same
        x, group = self._split_input(inputs), self._group
        own, home, is_data = self._parts_of_input(x), self.home, not is_recorded(x)
        core = shoal_nn.Dense(self._layer.units, bias=False)

        def forward(device: LogicalDevice, kernel: Array, part: Array) -> _Applied:
            y, _, pull = core.apply({"kernel": kernel}, {}, device.put(part), False)
            return y, pull

        outputs = group.map(forward, self.parts_of("kernel"), own)
        pulls = [pull for _, pull in outputs]

        def pullback(dy: Array) -> list[Array | None]:
            found = group.map(lambda device, pull: pull(device.put(dy)), pulls)
            gradients = self.gradients([it for it, _ in found])
            if is_data:
                return [None, *gradients]
            dx = SplitArray(group, -1, [it for _, it in found], x.shape[-1])
            return [dx if self._takes_parts else dx.gathered(home), *gradients]

        trained = [it for name, it in self.trained_variables().items() if name in self.split_axes]
        output = recorded(group.total(home, [y for y, _ in outputs]), (x, *trained), pullback)
        if self._layer.bias:
            output = output + self._variables["bias"]
        activation = self._activation
        return output if activation is None else applied(activation, output)

    def _split_input(self, inputs: Tensor) -> Tensor:
        """Returns the input of a call, in parts if the layer takes parts."""
        if not self._takes_parts:
            return self.input_of(inputs)
        if not isinstance(inputs.stored, SplitArray):
            raise errors.InvalidLayer(
                f"layer {self.name} has input_is_parallel=True, but its input is not in parts; give "
                "input_is_parallel=False, or gather_output=False to a ColumnParallelDense just before it",
                kind=type(self).__name__,
            )
        return inputs if inputs.dtype == self.dtype else self.input_of(inputs)

    def _parts_of_input(self, x: Tensor) -> Sequence[Array]:
        """Returns the part of the input for each device. Those of a whole input are still where the input is.

        Raises:
            InvalidLayer: the parts are on other devices.
        """
        self.check_width(x, self._variables["kernel"].shape[0])
        given = x.stored if self._takes_parts else x.array
        if isinstance(given, SplitArray) and given.group is not self._group:
            theirs, own = given.group.names, self._group.names
            raise errors.InvalidLayer(
                f"layer {self.name} is on {', '.join(own)}, but the parts of its input are on {', '.join(theirs)}; "
                "give both layers the same mesh",
                kind=type(self).__name__,
            )
        return views_of(given, -1, self._group)


__all__ = ["ColumnParallelDense", "RowParallelDense"]
