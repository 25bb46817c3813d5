"""Advice for error messages about folders that this process cannot use."""

import errno
import os


def advice(error: OSError) -> str:
    """Returns the advice for an OSError about a folder, or an empty string if the folder is not the cause."""
    match error.errno:
        case errno.ENOENT:
            return "there is no such folder: create it, or mount its volume"
        case errno.ENOTDIR | errno.EEXIST:
            return "it, or a part of its path, is not a folder: choose another folder"
        case errno.EACCES | errno.EPERM:
            return (
                f"Shoal runs as user id {os.geteuid()}, group id {os.getegid()}: let that user write there (chown; in "
                "Kubernetes, fsGroup), or choose another folder"
            )
        case errno.EROFS:
            return "its file system is read-only: mount a volume there, or choose another folder"
    return ""


__all__ = ["advice"]
