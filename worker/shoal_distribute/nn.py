"""Loss helpers of custom training loops, under their names in TensorFlow: `nn.compute_average_loss` and others."""

from shoal_distribute.keras.tape import compute_average_loss, scale_regularization_loss

__all__ = ["compute_average_loss", "scale_regularization_loss"]
