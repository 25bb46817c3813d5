"""Shared-memory segments: two processes share one, invalid ones are refused, and segments of dead owners are swept."""

import errno
import fcntl
import gc
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal._transport.segment import (
    FOLDER_VARIABLE,
    HEADER_BYTES,
    SHM,
    Regions,
    Segment,
    SegmentLost,
    SegmentUnavailable,
    remove_stale,
)

NBYTES = 3 * 4096 + 5
NAME = "shoal-" + "0" * 32
# Programs of other processes; the folder is their first argument.
GUEST = (
    "import sys; from pathlib import Path; from shoal._transport.segment import *\n"
    "_, folder, name, nbytes, nonce = sys.argv\n"
    "with Segment.open(name, int(nbytes), bytes.fromhex(nonce), directory=Path(folder)) as segment:\n"
    "    view = segment.view(100, 4)\n"
    "    view[:] = bytes(view).replace(b'i', b'o')\n"
)
OWNER = (
    "import sys; from pathlib import Path; from shoal._transport.segment import *\n"
    "segment = Segment.create(5000, directory=Path(sys.argv[1])); print(segment.name, flush=True); sys.stdin.read()\n"
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in real shared memory, removed with all that is in it."""
    path = Path(tempfile.mkdtemp(prefix="shoal-test-", dir=SHM))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def segment(folder: Path) -> Iterator[Segment]:
    with Segment.create(NBYTES, directory=folder) as segment:
        yield segment


def opened(segment: Segment, folder: Path) -> Segment:
    return Segment.open(segment.name, segment.nbytes, segment.nonce, directory=folder)


def names(folder: Path) -> list[str]:
    return os.listdir(folder)


def mapped(name: str) -> bool:
    """Whether a file of that name is mapped here, by the path that it was opened with."""
    return name in Path("/proc/self/maps").read_text()


def refusal(segment: Segment, folder: Path, **claims: Any) -> str:
    """The refusal when the segment is opened with other claims than its own."""
    said: dict[str, Any] = {"name": segment.name, "nbytes": segment.nbytes, "nonce": segment.nonce, **claims}
    with pytest.raises(SegmentUnavailable) as caught:
        Segment.open(**said, directory=folder)
    return str(caught.value)


# What a segment is.


def test_segment_is_a_private_fully_allocated_file_with_a_header(folder: Path, segment: Segment) -> None:
    status = (folder / segment.name).stat()
    assert re.fullmatch(r"shoal-[0-9a-f]{32}", segment.name)
    assert names(folder) == [segment.name]
    assert status.st_mode == 0o100600
    assert status.st_size == HEADER_BYTES + NBYTES
    assert status.st_blocks * 512 >= status.st_size
    raw = (folder / segment.name).read_bytes()
    assert struct.unpack_from("<8sI16sQ", raw) == (b"SHOALSEG", 1, segment.nonce, NBYTES)
    assert not any(raw[HEADER_BYTES:])


@pytest.mark.parametrize("umask", [0, 0o777])
def test_its_mode_does_not_depend_on_the_umask(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        segment = Segment.create(1, directory=folder)
    finally:
        os.umask(before)
    with segment:
        assert (folder / segment.name).stat().st_mode == 0o100600


def test_both_ends_see_the_same_bytes(folder: Path, segment: Segment) -> None:
    with opened(segment, folder) as guest:
        assert guest.nbytes == NBYTES
        segment.view(0, 3)[:] = b"abc"
        guest.view(NBYTES - 2, 2)[:] = b"yz"
        assert bytes(guest.view(0, 4)) == b"abc\0"
        assert bytes(segment.view(NBYTES - 3, 3)) == b"\0yz"
    assert bytes(segment.view(0, 3)) == b"abc"
    assert names(folder) == [segment.name], "the guest removes no name"


def test_two_processes_see_the_same_bytes(folder: Path, segment: Segment) -> None:
    segment.view(100, 4)[:] = b"ping"
    command = [sys.executable, "-c", GUEST, str(folder), segment.name, str(NBYTES), segment.nonce.hex()]
    subprocess.run(command, check=True, timeout=60)
    assert bytes(segment.view(100, 4)) == b"pong"


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, -1), (0, NBYTES + 1), (NBYTES, 1), (NBYTES + 1, 0)])
def test_a_part_that_is_not_there_is_refused(segment: Segment, offset: int, nbytes: int) -> None:
    with pytest.raises(ValueError, match=r"has 12,293 bytes"):
        segment.view(offset, nbytes)


def test_parts_reach_to_the_last_byte_and_may_be_empty(segment: Segment) -> None:
    assert len(segment.view(0, NBYTES)) == NBYTES
    assert len(segment.view(NBYTES, 0)) == 0
    assert segment.view(1, 2).format == "B"
    assert not segment.view(1, 2).readonly


# How it ends.


def test_memory_outlives_the_name(folder: Path, segment: Segment) -> None:
    guest = opened(segment, folder)
    segment.unlink()
    segment.unlink()
    assert names(folder) == []
    segment.view(0, 1)[0] = 7
    assert guest.view(0, 1)[0] == 7
    segment.close()
    assert guest.view(0, 1)[0] == 7
    guest.close()


def test_closed_segment_refuses_access(folder: Path) -> None:
    segment = Segment.create(NBYTES, directory=folder)
    segment.close()
    segment.close()
    assert names(folder) == []
    with pytest.raises(SegmentUnavailable, match="is closed"):
        segment.view(0, 1)
    with pytest.raises(SegmentUnavailable, match="is closed"):
        segment.check()


def test_segment_is_unmapped_with_its_last_view(folder: Path, segment: Segment) -> None:
    guest = opened(segment, folder)
    view = guest.view(8, 8)
    segment.view(8, 1)[0] = 9
    guest.close()
    assert view[0] == 9
    part = view[1:]
    del view
    assert mapped(segment.name)
    del part
    assert not mapped(segment.name)


def test_no_descriptor_is_left(folder: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with Segment.create(NBYTES, directory=folder) as segment, opened(segment, folder):
            refusal(segment, folder, nonce=bytes(16))
        with pytest.raises(SegmentUnavailable):
            Segment.create(10**15, directory=folder)
        remove_stale(folder)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_slot_outlives_the_segment_and_the_slots(folder: Path) -> None:
    segment = Segment.create(4096, directory=folder)
    guest = opened(segment, folder)
    slots = Regions([guest.view(0, 4096)])
    taken = slots.take()
    assert taken
    _, array = taken
    del taken
    guest.close()
    segment.close()
    del slots
    array[:] = 3
    assert mapped(segment.name)
    del array
    assert not mapped(segment.name)


@pytest.mark.parametrize("size", [HEADER_BYTES + NBYTES - 1, 4096, 0])
def test_a_file_that_shrank_is_an_error_and_no_signal(folder: Path, segment: Segment, size: int) -> None:
    with opened(segment, folder) as guest:
        guest.check()
        os.truncate(folder / segment.name, size)
        for end in (segment, guest):
            with pytest.raises(SegmentLost, match=rf"was truncated to {size:,} of 16,389 bytes"):
                end.view(0, 1)
            with pytest.raises(SegmentLost):
                end.check()


# What is refused.


def test_empty_segment_is_refused(folder: Path) -> None:
    for nbytes in (0, -1):
        with pytest.raises(ValueError, match="at least one byte"):
            Segment.create(nbytes, directory=folder)


def test_segment_beyond_the_free_space_is_refused_before_allocation(folder: Path) -> None:
    with pytest.raises(SegmentUnavailable, match=r"needs 1,000,000,000,004,096 bytes.* are free.*--shm-size"):
        Segment.create(10**12 * 1000, directory=folder)
    assert names(folder) == []


@pytest.mark.parametrize(
    ("number", "advice"), [(errno.ENOSPC, "--shm-size"), (errno.EOPNOTSUPP, "use a tmpfs"), (errno.EIO, "")]
)
def test_segment_that_the_kernel_refuses_leaves_no_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch, number: int, advice: str
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(SegmentUnavailable, match=rf"{os.strerror(number)}.*{advice}"):
        Segment.create(NBYTES, directory=folder)
    assert names(folder) == []


def test_without_a_folder_for_it_there_is_no_segment(folder: Path) -> None:
    with pytest.raises(SegmentUnavailable, match="No such file or directory; mount a tmpfs there"):
        Segment.create(NBYTES, directory=folder / "none")
    with pytest.raises(SegmentUnavailable, match="in /proc/self: "):
        Segment.create(NBYTES, directory=Path("/proc/self"))
    assert remove_stale(folder / "none") == []


@pytest.mark.parametrize("named", [True, False])
def test_the_environment_may_name_the_folder(folder: Path, named: bool) -> None:
    code = "from shoal._transport.segment import SHM; print(SHM)"
    environment = {**os.environ, FOLDER_VARIABLE: str(folder) if named else ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == (str(folder) if named else "/dev/shm")


@pytest.mark.parametrize(
    "name", ["", "shoal-", "shoal-" + "A" * 32, "../" + NAME, "/dev/shm/" + NAME, NAME[:-1], NAME + "0", NAME + "\n"]
)
def test_other_names_are_refused(folder: Path, segment: Segment, name: str) -> None:
    assert "is not a segment's name" in refusal(segment, folder, name=name)


def test_a_name_that_is_not_here_is_refused(folder: Path, segment: Segment) -> None:
    assert "No such file" in refusal(segment, folder, name=NAME)


def test_a_link_is_not_followed(folder: Path, segment: Segment) -> None:
    link = folder / NAME
    link.symlink_to(folder / segment.name)
    assert os.strerror(errno.ELOOP) in refusal(segment, folder, name=link.name)


def test_a_folder_and_a_pipe_are_refused(folder: Path, segment: Segment) -> None:
    (folder / NAME).mkdir()
    refusal(segment, folder, name=NAME)
    os.mkfifo(folder / ("shoal-" + "1" * 32), 0o600)
    assert "is not a regular file" in refusal(segment, folder, name="shoal-" + "1" * 32)


@pytest.mark.parametrize("mode", [0o640, 0o601, 0o606])
def test_a_file_that_others_may_touch_is_refused(folder: Path, segment: Segment, mode: int) -> None:
    (folder / segment.name).chmod(mode)
    assert f"is accessible to other users (mode {mode:04o})" in refusal(segment, folder)


def test_another_users_file_is_refused_and_not_swept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = Segment.create(NBYTES, directory=folder)
    name = segment.name
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "run both processes as the same user" in refusal(segment, folder)
    del segment  # the lock ends, as with the owner's death
    gc.collect()
    assert remove_stale(folder) == []
    monkeypatch.undo()
    assert remove_stale(folder) == [name]


@pytest.mark.parametrize("nbytes", [NBYTES - 1, NBYTES + 1, 0, -1, -HEADER_BYTES, 2**64, 10**30])
def test_another_size_is_refused(folder: Path, segment: Segment, nbytes: int) -> None:
    assert f"has {HEADER_BYTES + NBYTES} bytes instead of a header of 4096 and {nbytes}" in refusal(
        segment, folder, nbytes=nbytes
    )


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES])
def test_a_file_without_room_for_anything_is_refused(folder: Path, segment: Segment, size: int) -> None:
    os.truncate(folder / segment.name, size)
    assert f"has {size} bytes" in refusal(segment, folder, nbytes=size - HEADER_BYTES)


@pytest.mark.parametrize("nonce", [b"", bytes(16), bytes(17)])
def test_another_nonce_is_refused(folder: Path, segment: Segment, nonce: bytes) -> None:
    assert "has another nonce" in refusal(segment, folder, nonce=nonce)
    assert "has another nonce" in refusal(segment, folder, nonce=segment.nonce + nonce[:1] if nonce else b"x")


@pytest.mark.parametrize(
    ("offset", "data", "complaint"),
    [
        (0, b"something", "is not a segment"),
        (8, struct.pack("<I", 2), "has version 2, and this is version 1"),
        (28, struct.pack("<Q", NBYTES + 1), f"has a header for {NBYTES + 1} bytes"),
    ],
)
def test_another_header_is_refused(folder: Path, segment: Segment, offset: int, data: bytes, complaint: str) -> None:
    with (folder / segment.name).open("r+b") as file:
        file.seek(offset)
        file.write(data)
    assert complaint in refusal(segment, folder)


def test_a_file_with_holes_is_refused(folder: Path, segment: Segment) -> None:
    os.truncate(folder / segment.name, 0)
    os.truncate(folder / segment.name, HEADER_BYTES + NBYTES)
    assert "has holes" in refusal(segment, folder)


# What dead owners leave.


def test_sweep_removes_segments_of_killed_owners_only(folder: Path, segment: Segment) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        try:
            assert owner.stdout
            name = owner.stdout.readline().strip()
            assert set(names(folder)) == {name, segment.name}
            assert remove_stale(folder) == []
        finally:
            owner.kill()
        owner.wait(60)
    assert set(names(folder)) == {name, segment.name}
    assert remove_stale(folder) == [name]
    assert remove_stale(folder) == []
    assert names(folder) == [segment.name]


def test_a_guest_keeps_its_memory_but_no_name(folder: Path) -> None:
    segment = Segment.create(NBYTES, directory=folder)
    name = segment.name
    with opened(segment, folder) as guest:
        del segment  # the lock ends, as with the owner's death
        gc.collect()
        assert remove_stale(folder) == [name]
        guest.view(0, 1)[0] = 5
        guest.check()


def test_segment_that_its_owner_dropped_is_swept(folder: Path) -> None:
    name = Segment.create(NBYTES, directory=folder).name
    gc.collect()
    assert remove_stale(folder) == [name]


def test_a_sweep_removes_nothing_but_segments(folder: Path, segment: Segment) -> None:
    (folder / "shoal-something").touch()
    (folder / NAME).mkdir()
    (folder / ("shoal-" + "1" * 32)).symlink_to(folder / "shoal-something")
    os.mkfifo(folder / ("shoal-" + "2" * 32))
    before = set(names(folder))
    assert remove_stale(folder) == []
    assert set(names(folder)) == before


def test_late_sweep_removes_no_other_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check and the lock, the file disappears and another file takes its name."""
    path = folder / Segment.create(NBYTES, directory=folder).name
    gc.collect()

    def slow(file: int, operation: int) -> None:
        path.unlink()
        path.write_bytes(b"another")

    monkeypatch.setattr(fcntl, "flock", slow)
    assert remove_stale(folder) == []
    assert path.read_bytes() == b"another"


def test_sweeps_and_owners_at_once_never_meet(folder: Path) -> None:
    """No segment is swept between its creation and its end, however often somebody looks."""
    done = threading.Event()
    swept: list[str] = []

    def sweep_on() -> None:
        while not done.is_set():
            swept.extend(remove_stale(folder))

    thread = threading.Thread(target=sweep_on)
    thread.start()
    try:
        for _ in range(200):
            with Segment.create(1, directory=folder) as segment:
                opened(segment, folder).close()
    finally:
        done.set()
        thread.join()
    assert swept == []
    assert names(folder) == []
