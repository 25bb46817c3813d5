"""Files of users that are written whole or not at all."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Where to write what is to be in a file: beside it, and put in its place if `with` ends well; else it is gone."""
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        yield unfinished
        os.replace(unfinished, file)
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()


__all__ = ["atomic_write"]
