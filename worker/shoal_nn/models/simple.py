"""Simple models: a perceptron and a small network for images."""

from collections.abc import Sequence

from shoal_nn.activations import ReLU
from shoal_nn.containers import Sequential
from shoal_nn.convolution import Conv2D
from shoal_nn.dense import Dense
from shoal_nn.dropout import Dropout
from shoal_nn.layer import Layer
from shoal_nn.pooling import MaxPool
from shoal_nn.reshaping import Flatten


def mlp(classes: int, hidden: Sequence[int] = (256,), dropout: float = 0.0) -> Sequential:
    """Returns a perceptron with ReLU: "hidden0", "hidden1" and so on, then "head". Images are flattened.

    Args:
        classes: number of outputs.
        hidden: units of each hidden layer.
        dropout: dropout rate of each hidden layer's outputs; 0 means none.

    Returns:
        A model from images [batch, height, width, channels] to logits [batch, classes].

    Raises:
        InvalidLayer: an argument is out of range.
    """
    layers: dict[str, Layer] = {"flatten": Flatten()}
    for number, units in enumerate(hidden):
        layers |= {f"hidden{number}": Dense(units), f"relu{number}": ReLU()}
        layers |= {f"dropout{number}": Dropout(dropout)} if dropout else {}
    return Sequential({**layers, "head": Dense(classes)})


def small_cnn(classes: int, dropout: float = 0.25) -> Sequential:
    """Returns two 3x3 convolutions with pooling and a hidden layer of 128, for images of 28x28 or 32x32.

    Args:
        classes: number of outputs.
        dropout: dropout rate before the hidden layer and before the head.

    Returns:
        A model from images [batch, height, width, channels] to logits [batch, classes].

    Raises:
        InvalidLayer: an argument is out of range.
    """
    return Sequential(
        {
            "conv1": Conv2D(32, input_gradient=False),
            "relu1": ReLU(),
            "pool1": MaxPool(2),
            "conv2": Conv2D(64),
            "relu2": ReLU(),
            "pool2": MaxPool(2),
            "flatten": Flatten(),
            "dropout1": Dropout(dropout),
            "hidden": Dense(128),
            "relu3": ReLU(),
            "dropout2": Dropout(dropout),
            "head": Dense(classes),
        }
    )


__all__ = ["mlp", "small_cnn"]
