"""Loss helpers of custom training loops, under the name that they have in TensorFlow: `nn.compute_average_loss`."""

from shoal_distribute.keras.tape import compute_average_loss

__all__ = ["compute_average_loss"]
