"""Checkpoints of custom training loops, under the names that they have in TensorFlow: `train.Checkpoint`."""

from shoal_distribute.keras.checkpoints import Checkpoint, CheckpointManager, RestoreStatus, latest_checkpoint

__all__ = ["Checkpoint", "CheckpointManager", "RestoreStatus", "latest_checkpoint"]
