"""Data sets by Keras' names. They read files that a user has downloaded; nothing is downloaded here."""

from shoal_distribute.keras.datasets import cifar10

__all__ = ["cifar10"]
