"""Split layers over processes: stages x replicas x split, compared with one process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from shoal_distribute import Checkpoint, PipelineStrategy, keras
from support.clusters.local import ROOT
from support.programs.forked_split import Mesh
from support.split_models import MICRO_BATCHES, check_equal, check_same_bits, made, split_net, trained, trained_whole

pytestmark = pytest.mark.cluster

PROGRAM = ROOT / "tests/support/programs/forked_split.py"


def run(*meshes: Mesh) -> list[list[list[np.ndarray]]]:
    """Runs meshes one after the other. Returns what their ranks have, or nothing for those that failed."""
    # One thread: what others hold at a fork, nobody would give back.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), json.dumps([asdict(it) for it in meshes])]
    for mesh in meshes:
        Path(mesh.folder).mkdir()
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return [[list(np.load(file).values()) for file in sorted(Path(mesh.folder).glob("rank-*.npz"))] for mesh in meshes]


@pytest.fixture(autouse=True)
def doubles() -> Iterator[None]:
    keras.config.set_floatx("float64")
    yield
    keras.config.set_floatx("float32")


def test_processes_on_a_mesh_compute_what_one_process_does(tmp_path: Path) -> None:
    sizes = [(1, 1, 2), (2, 1, 2), (1, 2, 2), (2, 2, 1)]
    meshes = [Mesh(str(tmp_path / "-".join(map(str, it))), it) for it in sizes]
    lost = Mesh(str(tmp_path / "lost"), (2, 1, 2), lost=1)
    single = Mesh(str(tmp_path / "single"), (1, 1, 1), steps=2)
    again = Mesh(str(tmp_path / "again"), (1, 1, 2), steps=2, restore=str(tmp_path / "single/saved-1"))
    *found, _, _, resumed = run(*meshes, lost, single, again)
    expected = trained_whole(30)
    for mesh, ranks in zip(meshes, found, strict=True):
        assert len(ranks) == np.prod(mesh.sizes)
        check_equal(ranks[0], expected)
        check_same_bits(ranks)
    for each in resumed:
        check_equal(each, trained_whole(4))
    for rank in (0, 2, 3):
        said = Path(lost.folder, f"rank-{rank}.txt").read_text()
        assert "rank 1 of 4 (part 1 of stage 0 of replica 0) has ended" in said
    with PipelineStrategy(stages=1, micro_batches=MICRO_BATCHES) as strategy:
        model = made(strategy, lambda: split_net(None))
        Checkpoint(model=model, optimizer=model.optimizer).restore(str(Path(meshes[1].folder, "saved-1")))
        check_equal(trained(model, 2), trained_whole(32))
