"""What to do about a folder that this process cannot use; of the coordinator's store and of checkpoints."""

import errno
import os


def advice(error: OSError) -> str:
    """What to do about an error of a folder's; empty where it says nothing about the folder itself."""
    match error.errno:
        case errno.ENOENT:
            return "there is no such folder: make it, or mount the volume that belongs there"
        case errno.ENOTDIR | errno.EEXIST:
            return "it is no folder, or something on the way there is none: name another"
        case errno.EACCES | errno.EPERM:
            return (
                f"Shoal runs as user id {os.geteuid()}, group id {os.getegid()}: let that user write there (chown; in "
                "Kubernetes, fsGroup), or choose another folder"
            )
        case errno.EROFS:
            return "its file system is read-only: mount a volume there, or choose another folder"
    return ""


__all__ = ["advice"]
