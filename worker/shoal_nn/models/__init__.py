"""Well-known models, built from layers of `shoal_nn`.

Each function that is named like a model returns a layer that describes it and holds no parameter values. `load_weights`
reads the values from a published file, and `pretrained` makes them the initial values of the variables.
"""

from shoal_nn.models.fine_tuning import frozen, with_head
from shoal_nn.models.mobilenet import mobilenet_v2
from shoal_nn.models.resnet import resnet
from shoal_nn.models.simple import mlp, small_cnn
from shoal_nn.models.weights import load_weights, pretrained
from shoal_nn.models.wide_deep import wide_deep

__all__ = [
    "frozen",
    "load_weights",
    "mlp",
    "mobilenet_v2",
    "pretrained",
    "resnet",
    "small_cnn",
    "wide_deep",
    "with_head",
]
