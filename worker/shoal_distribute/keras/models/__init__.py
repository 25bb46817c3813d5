"""Models by Keras' names: functional ones, sequential ones, and models from files."""

from shoal_distribute.keras.models.loading import load_model
from shoal_distribute.keras.models.model import Model
from shoal_distribute.keras.models.sequential import Sequential

__all__ = ["Model", "Sequential", "load_model"]
