"""Damage at any place of a checkpoint: the check and the restore both find it, and an older checkpoint is used.

The long form cuts the files at every 4 KiB, and flips 1,000 bits.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from shoal import errors
from shoal._checkpoint.catalogue import Catalogue, path_of
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import FILE, Manifest
from shoal._checkpoint.slices import SavedVariables, tensor_name
from shoal._checkpoint.tensor_files import write_tensors
from support import run_lengths

pytestmark = pytest.mark.timeout(run_lengths.size(120, 1200))

EVERY = 4096
ROWS, COLUMNS = 1200, 1000  # two shards of more than one block each, of 4 MiB
SEED = 4
UNIT = "s to the one before"


def save(catalogue: Catalogue, number: int) -> None:
    """Two shards, with a slot, and a manifest of more than 4 KiB."""
    chance = np.random.default_rng(number)
    entries = []
    for shard, start in enumerate((0, ROWS // 2)):
        arrays = {
            tensor_name(kind, start, "dense/kernel"): chance.normal(size=(ROWS // 2, COLUMNS)).astype(np.float32)
            for kind in ("value", "momentum")
        }
        tensors = [(name, array.dtype, array.shape) for name, array in arrays.items()]
        data = [array.reshape(-1).view(np.uint8).data for array in arrays.values()]
        path = (*path_of("digits", number), f"shard-{shard:05}.safetensors")
        entries.append(write_tensors(catalogue.folder, path, tensors, data, {"job": "digits"}))
    variables = tuple({"name": f"variable-{index}", "shape": ["4", "4"]} for index in range(100))
    catalogue.publish(Manifest("digits", number, 1.5, 7, 9, {"name": "digits"}, variables, tuple(entries)))


def check(catalogue: Catalogue, manifest: Manifest) -> None:
    """Checks a checkpoint, as `shoal checkpoints verify` does."""
    catalogue.verify(manifest)


def restore(catalogue: Catalogue, manifest: Manifest) -> None:
    """Reads all values and slots, as a server does that restores the checkpoint."""
    with SavedVariables(catalogue.folder, manifest) as saved:
        target = np.empty(ROWS * COLUMNS, np.float32)
        for kind in saved.kinds("dense/kernel"):
            saved.read((kind, "dense/kernel", 0, target))


def used(catalogue: Catalogue, use: Callable[[Catalogue, Manifest], None]) -> int:
    """The number of the newest checkpoint that can be used; newer ones have to be known for damaged, by name."""
    for found in catalogue.newest("digits"):
        try:
            if isinstance(found, errors.ShoalError):
                raise found
            use(catalogue, found)
        except errors.CorruptCheckpoint as error:
            if "00000002" not in error.message:
                raise
        else:
            return found.number
    return 0


def check_previous_is_used(catalogue: Catalogue, what: str) -> float:
    """Seconds until the one before is used, by who checks and by who restores; the slower of the two."""
    took = []
    for use in (check, restore):
        start = time.monotonic()
        assert used(catalogue, use) == 1, what
        took.append(time.monotonic() - start)
    return max(took)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    for number in (1, 2):
        save(Catalogue(LocalStorage(root)), number)
    return root


@pytest.fixture
def catalogue(root: Path) -> Iterator[Catalogue]:
    catalogue = Catalogue(LocalStorage(root))
    yield catalogue
    assert used(catalogue, check) == used(catalogue, restore) == 2, "a test left damage"


@contextmanager
def cut_short(file: Path, size: int) -> Iterator[None]:
    with file.open("r+b") as opened:
        opened.seek(size)
        rest = opened.read()
        os.truncate(file, size)
        yield
        opened.seek(size)
        opened.write(rest)


def flip(file: Path, bit: int) -> None:
    with file.open("r+b") as opened:
        opened.seek(bit // 8)
        byte = opened.read(1)[0]
        opened.seek(bit // 8)
        opened.write(bytes([byte ^ 1 << bit % 8]))


def test_a_checkpoint_cut_short_anywhere_is_not_used(catalogue: Catalogue, root: Path) -> None:
    places = [
        (file, size)
        for file in sorted((root / "digits" / "00000002").iterdir())
        for size in range(0, file.stat().st_size, EVERY)
    ]
    assert len({file for file, _ in places}) == 3
    assert sum(file.name == FILE for file, _ in places) > 1
    chosen = random.Random(SEED).sample(places, min(len(places), run_lengths.runs(40, len(places))))
    with run_lengths.count_runs("corrupt_checkpoint", len(chosen), UNIT) as counted:
        for file, size in chosen:
            with cut_short(file, size):
                counted.passes(check_previous_is_used(catalogue, f"{file.name} cut short at {size}"))
    print(f"{len(chosen)} of {len(chosen)} truncations found, of {len(places)} places")


def test_checkpoint_with_a_flipped_bit_is_not_used(catalogue: Catalogue, root: Path) -> None:
    files = sorted((root / "digits" / "00000002").iterdir())
    chance = random.Random(SEED)
    count = run_lengths.runs(60, 1000)
    with run_lengths.count_runs("corrupt_checkpoint", count, UNIT) as counted:
        for number in range(count):
            # A third in manifests and the beginnings of files, which are few of the bytes and all of the structure.
            file = files[number % len(files)]
            size = file.stat().st_size
            bit = chance.randrange(8 * (min(size, EVERY) if number % 9 < 3 else size))
            flip(file, bit)
            took = check_previous_is_used(catalogue, f"bit {bit} of {file.name}")
            flip(file, bit)
            counted.passes(took)
    print(f"{count} of {count} flipped bits found")


def test_a_file_that_is_longer_swapped_or_missing_is_not_used(catalogue: Catalogue, root: Path) -> None:
    first, second = sorted((root / "digits" / "00000002").glob("*.safetensors"))
    text, other = first.read_bytes(), second.read_bytes()
    for damaged in (text + b"\0", text + text, other, (root / "digits" / "00000001" / first.name).read_bytes()):
        first.write_bytes(damaged)
        assert used(catalogue, check) == used(catalogue, restore) == 1
    first.unlink()
    assert used(catalogue, check) == used(catalogue, restore) == 1
    first.write_bytes(text)
