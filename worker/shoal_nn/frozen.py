"""Frozen layers, for fine-tuning."""

from dataclasses import dataclass

from shoal.program import Array
from shoal.variables import Variable
from shoal_nn.layer import Layer, LayerInput, Pullback, Shape, Train, Values


@dataclass(frozen=True)
class Frozen(Layer):
    """Layer that is applied as in evaluation and whose variables do not change.

    Variables keep their names, shapes and dtypes, so that they can be restored from an earlier job. All of them are
    state, including parameters. The new state that `apply` returns is empty, so they are never pushed. Their
    aggregation is "last". Statistics of other layers have "mean", so a push can carry these statistics without the
    frozen variables (see `shoal.StepOutput.updates`).

    Args:
        layer: the layer to apply.
        input_gradient: whether to compute dx. False suits a model's first layers; dx is then None.
    """

    layer: Layer
    input_gradient: bool = False

    def output_shape(self, shape: LayerInput) -> Shape:
        return self.layer.output_shape(shape)

    def variables(self, shape: LayerInput) -> dict[str, Variable]:
        return {
            name: Variable(it.shape, it.dtype, it.initializer, trainable=False, partitioner=it.partitioner)
            for name, it in self.layer.variables(shape).items()
        }

    def apply(self, params: Values, state: Values, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:  # noqa: ARG002
        y, _, pull = self.layer.apply(state, state, x, False)
        if self.input_gradient:
            return y, {}, lambda dy: ({}, pull(dy)[1])
        return y, {}, lambda _: ({}, None)


__all__ = ["Frozen"]
