"""Keras-shaped front: layers, models, losses, metrics and optimizers by Keras' names, over NumPy and CuPy.

The names, arguments and defaults are those of Keras 3, and so are the values. Layers of `shoal_nn` and optimizers of
`shoal.optim` compute them. Models are made in the scope of a strategy, which places their variables.

    from shoal_distribute import MirroredStrategy, keras

    strategy = MirroredStrategy(["/cpu:0", "/cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((28, 28)), keras.layers.Flatten(), keras.layers.Dense(10)])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, metrics=["accuracy"])
    model.fit(images, labels, batch_size=64, epochs=3)
"""

from shoal_distribute.keras import (
    activations,
    applications,
    callbacks,
    config,
    constraints,
    datasets,
    initializers,
    layers,
    losses,
    metrics,
    models,
    optimizers,
    regularizers,
    saving,
    utils,
)
from shoal_distribute.keras.layers import Input
from shoal_distribute.keras.models import Model, Sequential
from shoal_distribute.keras.tensor import Tensor

__all__ = [
    "Input",
    "Model",
    "Sequential",
    "Tensor",
    "activations",
    "applications",
    "callbacks",
    "config",
    "constraints",
    "datasets",
    "initializers",
    "layers",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "regularizers",
    "saving",
    "utils",
]
