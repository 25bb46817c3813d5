"""Models that people name, made of `shoal_nn`'s layers: functions that give a layer, which holds no array."""

from shoal_nn.models.mobilenet import mobilenet_v2
from shoal_nn.models.resnet import resnet
from shoal_nn.models.simple import mlp, small_cnn

__all__ = ["mlp", "mobilenet_v2", "resnet", "small_cnn"]
