"""A server's part of checkpoints: the session of a cut, and the writer that saves shards in the background.

`shoal._checkpoint` has the formats of files and manifests. `shoal_server.serving` and `shoal_server.process` import
this package.
"""

from shoal_server.checkpoints.writer import CheckpointWriter

__all__ = [
    "CheckpointWriter",
]
