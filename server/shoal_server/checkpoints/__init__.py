"""A server's part of a checkpoint: the session of a cut, and the writing of its shards in the background.

Files and manifests are in `shoal._checkpoint`. `shoal_server.serving` and the process import it.
"""

from shoal_server.checkpoints.writer import CheckpointWriter

__all__ = [
    "CheckpointWriter",
]
