"""Atomic writes of users' files."""

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yields a temporary path beside the file, which replaces the file if the block succeeds, else is removed."""
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        yield unfinished
        os.replace(unfinished, file)
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()


__all__ = ["atomic_write"]
