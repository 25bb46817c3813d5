"""Files written past the page cache: the bytes are the same on file systems with and without direct writes."""

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shoal._checkpoint import direct_io

BLOCK = 2 * 4096
SIZES = [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK - 4096, 5 * BLOCK + 17]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_io, "BLOCK_BYTES", BLOCK)


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield opened
    os.close(opened)


def content(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


def cut(data: bytes, piece: int) -> list[memoryview]:
    return [memoryview(data)[start : start + piece] for start in range(0, len(data), piece)]


def is_direct(descriptor: int) -> bool:
    return bool(fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_DIRECT)


@pytest.mark.parametrize("piece", [777, BLOCK, 10 * BLOCK])
@pytest.mark.parametrize("size", SIZES)
def test_written_file_is_read_unchanged(descriptor: int, tmp_path: Path, size: int, piece: int) -> None:
    data = content(size)
    direct_io.write_file(descriptor, [b"", *cut(data, piece), b""])
    assert (tmp_path / "file").read_bytes() == data


def test_pieces_may_be_reused_once_the_next_is_asked_for(descriptor: int, tmp_path: Path) -> None:
    scratch = bytearray(BLOCK)

    def pieces() -> Iterator[bytearray]:
        for number in range(5):
            scratch[:] = bytes([number]) * BLOCK
            yield scratch

    direct_io.write_file(descriptor, pieces())
    assert (tmp_path / "file").read_bytes() == b"".join(bytes([number]) * BLOCK for number in range(5))


def test_small_files_take_the_usual_way(descriptor: int) -> None:
    direct_io.write_file(descriptor, [content(BLOCK - 1)])
    assert not is_direct(descriptor)


@pytest.mark.parametrize("refused", ["the flag", "the write"])
def test_a_file_system_without_direct_writes(
    descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    set_flags, write = fcntl.fcntl, os.pwrite

    def no_flag(opened: int, command: int, argument: int = 0) -> int:
        if refused == "the flag" and argument & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return set_flags(opened, command, argument)

    def no_write(opened: int, data: memoryview, start: int) -> int:
        if is_direct(opened):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return write(opened, data, start)

    monkeypatch.setattr(fcntl, "fcntl", no_flag)
    monkeypatch.setattr(os, "pwrite", no_write)
    data = content(SIZES[-1])
    direct_io.write_file(descriptor, cut(data, 1000))
    assert (tmp_path / "file").read_bytes() == data
    assert not is_direct(descriptor)


def test_partial_writes_are_continued(descriptor: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda opened, data, start: write(opened, data[: max(1, len(data) // 3)], start))
    data = content(SIZES[-1])
    direct_io.write_file(descriptor, [data])
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EINVAL])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_write_that_fails_is_an_error(
    descriptor: int, monkeypatch: pytest.MonkeyPatch, after: int, number: int
) -> None:
    write, written = os.pwrite, 0

    def failing(opened: int, data: memoryview, start: int) -> int:
        nonlocal written
        if written >= after:
            raise OSError(number, os.strerror(number))
        written += 1
        return write(opened, data, start)

    monkeypatch.setattr(os, "pwrite", failing)
    with pytest.raises(OSError, match=os.strerror(number)):
        direct_io.write_file(descriptor, cut(content(SIZES[-1]), 1000))
