"""A process dies at each step of writing a checkpoint: the last complete one is restored, which may be this one."""

import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from shoal._checkpoint.catalogue import Catalogue
from shoal._checkpoint.local_storage import LocalStorage
from shoal._checkpoint.slices import SavedVariables
from support import forms
from support.faults import checkpoint_writer
from support.faults.checkpoint_writer import JOB, POINTS, values

RUNS = forms.runs(1, 10)

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(60 + 20 * RUNS)]


def die_writing(root, number, point, run):
    command = [sys.executable, checkpoint_writer.__file__, str(root), str(number), point, str(run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, f"it was to die {point}: {done.stderr}"


def restored(catalogue):
    """The number of the newest checkpoint, which has to be whole."""
    manifest = next(catalogue.newest(JOB))
    catalogue.verify(manifest)
    with SavedVariables(catalogue.folder, manifest) as saved:
        ((shape, dtype),) = saved.variables.values()
        target = np.empty(np.prod(shape), dtype)
        saved.read(("value", "kernel", 0, target))
    assert target.tobytes() == values(manifest.number).tobytes()
    return manifest.number


@pytest.mark.parametrize("point", POINTS)
def test_what_was_whole_is_restored_wherever_the_writer_dies(tmp_path, point):
    published = point == "after the manifest"
    with forms.tally("checkpoint_faults", RUNS, "s to restore") as tally:
        for run in range(RUNS):
            root = tmp_path / str(run)
            checkpoint_writer.write(root, 1)
            catalogue = Catalogue(LocalStorage(root))
            die_writing(root, 2, point, run)
            start = time.monotonic()
            assert restored(catalogue) == (2 if published else 1)
            took = time.monotonic() - start
            there = {int(name) for name in catalogue.folder.names([JOB])}
            assert catalogue.next_number(JOB) == max(there) + 1
            # What is torn goes, and what is complete stays; then the next one is written.
            assert catalogue.remove_incomplete(JOB) == sorted(there - {*catalogue.numbers(JOB)})
            kept = [path for path in root.rglob("*") if path.is_file()]
            assert len(kept) == (2 if published else 1) * (checkpoint_writer.SHARDS + 1), "something torn is left"
            checkpoint_writer.write(root, 3)
            assert restored(catalogue) == 3
            tally.passes(took)
    print(f"{RUNS} of {RUNS} restored after a death {point}")


def test_the_writer_writes_the_same_when_nobody_kills_it(tmp_path):
    command = [sys.executable, checkpoint_writer.__file__, str(tmp_path), "1", "none", "0"]
    subprocess.run(command, timeout=60, check=True)
    assert restored(Catalogue(LocalStorage(tmp_path))) == 1
