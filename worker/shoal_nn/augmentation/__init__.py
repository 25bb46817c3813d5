"""Layers that change images at random in training, with the arithmetic of Keras. In evaluation they return the images.

Images are [batch, height, width, channels]. Random numbers are drawn on the host, so a GPU gets the same ones.
"""

from shoal_nn.augmentation.changes import CenterCrop, RandomBrightness, RandomContrast, RandomCrop, RandomFlip
from shoal_nn.augmentation.warps import RandomRotation, RandomTranslation, RandomZoom

__all__ = [
    "CenterCrop",
    "RandomBrightness",
    "RandomContrast",
    "RandomCrop",
    "RandomFlip",
    "RandomRotation",
    "RandomTranslation",
    "RandomZoom",
]
