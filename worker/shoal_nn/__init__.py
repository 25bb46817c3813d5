"""Layers, losses and metrics over NumPy or CuPy, as pure functions. A program trains them.

A layer returns its output with a pullback: the function that computes the gradients of the layer (`layer.Pullback`). In
the docstrings, x is a layer's input and y its output. dx and dy are the gradients of a loss with respect to x and y.
"""

from shoal_nn.activations import ELU, GELU, SELU, LeakyReLU, ReLU, ReLU6, Sigmoid, SiLU, Softmax, Softplus, Tanh
from shoal_nn.containers import Add, ByFeature, Concat, Identity, Parallel, Residual, Sequential
from shoal_nn.convolution import Conv2D, DepthwiseConv2D
from shoal_nn.dense import Dense, Embedding
from shoal_nn.dropout import Dropout
from shoal_nn.features import Column, FeatureCross, crossed
from shoal_nn.frozen import Frozen
from shoal_nn.layer import Layer, Pullback, TrainingContext, one_by_one
from shoal_nn.losses import mean_squared_error, sigmoid_cross_entropy, softmax_cross_entropy
from shoal_nn.metrics import AreaUnderCurve, accuracy, top_k_accuracy
from shoal_nn.normalization import BatchNorm, LayerNorm
from shoal_nn.pooling import AvgPool, GlobalAvgPool, GlobalMaxPool, MaxPool
from shoal_nn.precision import LossScale, Policy
from shoal_nn.reshaping import Flatten, Interpolate, Rescale, Reshape, ZeroPad
from shoal_nn.supervised import BinaryClassification, MulticlassClassification, Objective, Supervised

__all__ = [
    "ELU",
    "GELU",
    "SELU",
    "Add",
    "AreaUnderCurve",
    "AvgPool",
    "BatchNorm",
    "BinaryClassification",
    "ByFeature",
    "Column",
    "Concat",
    "Conv2D",
    "Dense",
    "DepthwiseConv2D",
    "Dropout",
    "Embedding",
    "FeatureCross",
    "Flatten",
    "Frozen",
    "GlobalAvgPool",
    "GlobalMaxPool",
    "Identity",
    "Interpolate",
    "Layer",
    "LayerNorm",
    "LeakyReLU",
    "LossScale",
    "MaxPool",
    "MulticlassClassification",
    "Objective",
    "Parallel",
    "Policy",
    "Pullback",
    "ReLU",
    "ReLU6",
    "Rescale",
    "Reshape",
    "Residual",
    "Sequential",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Supervised",
    "Tanh",
    "TrainingContext",
    "ZeroPad",
    "accuracy",
    "crossed",
    "mean_squared_error",
    "one_by_one",
    "sigmoid_cross_entropy",
    "softmax_cross_entropy",
    "top_k_accuracy",
]
