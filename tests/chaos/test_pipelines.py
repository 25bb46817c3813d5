"""Stages of a pipeline that are killed: the others name them, and the job ends as if nothing had happened."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from support import run_lengths
from support.clusters.local import ROOT
from support.programs.forked_pipeline import RANKS, STAGES, Plan
from support.run_lengths import count_runs

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

PROGRAM = ROOT / "tests/support/programs/forked_pipeline.py"


def run(plans: Sequence[Plan]) -> list[list[dict[str, Any]]]:
    """Runs jobs one after the other. Returns what their ranks have to say: see the program."""
    # One thread: what others hold at a fork, nobody would give back.
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests"), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(PROGRAM), json.dumps([asdict(it) for it in plans])]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    found: list[list[dict[str, Any]]] = json.loads(ended.stdout)
    return found


def test_a_job_ends_as_if_its_stages_had_not_been_killed(tmp_path: Path) -> None:
    draw = random.Random(3)
    places = [tmp_path / "disturbed", tmp_path / "undisturbed"]
    for folder in places:
        folder.mkdir()
    with count_runs("stage_kill", count := run_lengths.runs(1, 10), "kills") as counted:
        epochs = 4 + 2 * count
        kills = [Plan(str(places[0]), epochs, draw.randrange(RANKS), draw.randrange(1, 2_000)) for _ in range(count)]
        *said, resumed, expected = run([*kills, *(Plan(str(folder), epochs) for folder in places)])
        for kill, ranks in zip(kills, said, strict=True):
            place = f"stage {kill.lost % STAGES} of replica {kill.lost // STAGES}"
            for rank, found in enumerate(ranks):
                assert rank == kill.lost or f"rank {kill.lost} of {RANKS} ({place}) has ended" in found["error"]
        assert resumed == expected
        assert len({json.dumps(found["variables"]) for found in expected}) == 1
        counted.passes(count, count)
