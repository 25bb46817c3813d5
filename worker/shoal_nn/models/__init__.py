"""Well-known models, built from layers of `shoal_nn`.

Each function returns a layer that describes the model and holds no parameter values.
"""

from shoal_nn.models.fine_tuning import frozen, with_head
from shoal_nn.models.mobilenet import mobilenet_v2
from shoal_nn.models.resnet import resnet
from shoal_nn.models.simple import mlp, small_cnn
from shoal_nn.models.wide_deep import wide_deep

__all__ = ["frozen", "mlp", "mobilenet_v2", "resnet", "small_cnn", "wide_deep", "with_head"]
