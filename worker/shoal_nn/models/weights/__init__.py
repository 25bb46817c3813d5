"""Published weights of the models: `files` reads them, `naming` finds them by name, `loading` is what users call."""

from shoal_nn.models.weights.loading import load_weights, pretrained

__all__ = ["load_weights", "pretrained"]
