"""Layers that are not trained any more, for fine-tuning."""

from dataclasses import dataclass

from shoal.program import Array
from shoal.variables import Variable
from shoal_nn.layer import Arrays, Layer, LayerInput, Pullback, Shape, Train


@dataclass(frozen=True)
class Frozen(Layer):
    """A layer as evaluation applies it, none of whose variables is trained or moves.

    They keep their names, shapes and dtypes, so that they can be restored from what the layer was trained in. All are
    state, the parameters too, but the new state of `apply` has none of them: nothing is pushed of what stays as it is.
    So that statistics that do move elsewhere in the model, means of a step's pushes, can be pushed without them, they
    are variables of another aggregation: "last".

    Args:
        layer: what is applied.
        input_gradient: whether there is dx. False, for a model's first layers: nobody before it learns, and it is None.
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

    def apply(self, params: Arrays, state: Arrays, x: Array, train: Train) -> tuple[Array, dict[str, Array], Pullback]:  # noqa: ARG002
        y, _, pull = self.layer.apply(state, state, x, False)
        if self.input_gradient:
            return y, {}, lambda dy: ({}, pull(dy)[1])
        return y, {}, lambda _: ({}, None)


__all__ = ["Frozen"]
