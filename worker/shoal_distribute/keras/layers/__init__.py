"""Layers by Keras' names, with its arguments and defaults. Pure layers of `shoal_nn` compute them."""

from shoal_distribute.keras.layers.activation import ELU, Activation, LeakyReLU, ReLU, Softmax
from shoal_distribute.keras.layers.augmentation import (
    CenterCrop,
    RandomBrightness,
    RandomContrast,
    RandomCrop,
    RandomFlip,
    RandomRotation,
    RandomTranslation,
    RandomZoom,
)
from shoal_distribute.keras.layers.base import KerasTensor, Layer
from shoal_distribute.keras.layers.convolution import Conv2D, DepthwiseConv2D
from shoal_distribute.keras.layers.core import (
    Dense,
    Dropout,
    Embedding,
    Flatten,
    Normalization,
    Rescaling,
    Reshape,
    Resizing,
)
from shoal_distribute.keras.layers.core_layer import WrappedLayer
from shoal_distribute.keras.layers.input import Input, InputLayer
from shoal_distribute.keras.layers.merging import Add, Average, Concatenate, Maximum, Multiply, Subtract
from shoal_distribute.keras.layers.normalization import BatchNormalization, LayerNormalization
from shoal_distribute.keras.layers.operation import Operation
from shoal_distribute.keras.layers.pooling import (
    AveragePooling2D,
    GlobalAveragePooling2D,
    GlobalMaxPooling2D,
    MaxPooling2D,
    ZeroPadding2D,
)
from shoal_distribute.keras.layers.split_dense import ColumnParallelDense, RowParallelDense
from shoal_distribute.keras.layers.split_embedding import ParallelEmbedding

AvgPool2D = AveragePooling2D
MaxPool2D = MaxPooling2D
GlobalAvgPool2D = GlobalAveragePooling2D
GlobalMaxPool2D = GlobalMaxPooling2D

__all__ = [
    "ELU",
    "Activation",
    "Add",
    "Average",
    "AveragePooling2D",
    "AvgPool2D",
    "BatchNormalization",
    "CenterCrop",
    "ColumnParallelDense",
    "Concatenate",
    "Conv2D",
    "Dense",
    "DepthwiseConv2D",
    "Dropout",
    "Embedding",
    "Flatten",
    "GlobalAveragePooling2D",
    "GlobalAvgPool2D",
    "GlobalMaxPool2D",
    "GlobalMaxPooling2D",
    "Input",
    "InputLayer",
    "KerasTensor",
    "Layer",
    "LayerNormalization",
    "LeakyReLU",
    "MaxPool2D",
    "MaxPooling2D",
    "Maximum",
    "Multiply",
    "Normalization",
    "Operation",
    "ParallelEmbedding",
    "RandomBrightness",
    "RandomContrast",
    "RandomCrop",
    "RandomFlip",
    "RandomRotation",
    "RandomTranslation",
    "RandomZoom",
    "ReLU",
    "Rescaling",
    "Reshape",
    "Resizing",
    "RowParallelDense",
    "Softmax",
    "Subtract",
    "WrappedLayer",
    "ZeroPadding2D",
]
