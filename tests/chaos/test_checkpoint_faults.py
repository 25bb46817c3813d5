"""Death of a process at each step of writing a checkpoint: the newest complete checkpoint can still be restored.

This may be the checkpoint that the process was writing.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from shoal._checkpoint.catalogue import Catalogue
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.manifest import Manifest
from shoal._checkpoint.slices import SavedVariables
from support import run_lengths
from support.faults import checkpoint_writer
from support.faults.checkpoint_writer import JOB, POINTS, values

RUNS = run_lengths.runs(1, 10)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(60 + 20 * RUNS)]


def check_writer_dies(root: Path, number: int, point: str, run: int) -> None:
    command = [sys.executable, checkpoint_writer.__file__, str(root), str(number), point, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, f"it was to die {point}: {done.stderr}"


def check_newest(catalogue: Catalogue) -> int:
    """Checks the newest checkpoint. Returns its number."""
    manifest = next(catalogue.newest(JOB))
    assert isinstance(manifest, Manifest)
    catalogue.verify(manifest)
    with SavedVariables(catalogue.folder, manifest) as saved:
        ((shape, dtype),) = saved.variables.values()
        target = np.empty(np.prod(shape), dtype)
        saved.read(("value", "kernel", 0, target))
    assert target.tobytes() == values(manifest.number).tobytes()
    return manifest.number


@pytest.mark.parametrize("point", POINTS)
def test_last_complete_checkpoint_is_restored_after_the_writer_dies(tmp_path: Path, point: str) -> None:
    published = point == "after the manifest"
    with run_lengths.count_runs("checkpoint_faults", RUNS, "s to restore") as counted:
        for run in range(RUNS):
            root = tmp_path / str(run)
            checkpoint_writer.write(root, 1)
            catalogue = Catalogue(LocalStorage(root))
            check_writer_dies(root, 2, point, run)
            start = time.monotonic()
            assert check_newest(catalogue) == (2 if published else 1)
            took = time.monotonic() - start
            there = {int(name) for name in catalogue.folder.names([JOB])}
            assert catalogue.next_number(JOB) == max(there) + 1
            # What is torn goes, and what is complete stays; then the next one is written.
            assert catalogue.remove_incomplete(JOB) == sorted(there - {*catalogue.numbers(JOB)})
            kept = [path for path in root.rglob("*") if path.is_file()]
            assert len(kept) == (2 if published else 1) * (checkpoint_writer.SHARDS + 1), "something torn is left"
            checkpoint_writer.write(root, 3)
            assert check_newest(catalogue) == 3
            counted.passes(took)
    print(f"{RUNS} of {RUNS} restored after a death {point}")


def test_writer_completes_without_a_kill(tmp_path: Path) -> None:
    command = [sys.executable, checkpoint_writer.__file__, str(tmp_path), "1", "none", "0"]
    subprocess.run(command, timeout=60, check=True)
    assert check_newest(Catalogue(LocalStorage(tmp_path))) == 1
