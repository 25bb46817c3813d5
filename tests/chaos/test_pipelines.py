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
from support.clusters.task_cluster import TaskCluster
from support.programs.forked_pipeline import RANKS, STAGES, Plan
from support.run_lengths import count_runs
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

PROGRAM = ROOT / "tests/support/programs/forked_pipeline.py"
TASK = ROOT / "tests/support/programs/pipeline_task.py"


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


def test_the_tasks_of_tf_config_resume_from_their_checkpoint_after_a_kill(tmp_path: Path) -> None:
    folder, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    folder.mkdir()
    undisturbed.mkdir()
    (folder / "armed").touch()
    plan = Plan(str(folder), epochs=4, lost=3)
    environment = {"PYTHONPATH": str(ROOT / "tests"), "PLAN": json.dumps(asdict(plan)), "OPENBLAS_NUM_THREADS": "1"}
    with TaskCluster(TASK, {"worker": RANKS}, environment) as cluster:
        *others, killed = cluster.tasks
        wait_until((folder / "waiting").exists, what="two epochs have ended", timeout_s=60)
        assert cluster.kill(killed)
        wait_until(lambda: all(map(cluster.has_ended, others)), what="the other tasks end", timeout_s=60)
        (folder / "armed").unlink()
        for task in others:
            assert f"rank 3 of {RANKS} (stage 1 of replica 1)" in cluster.revive(task)
        cluster.start(killed)
        found = [json.loads(cluster.output(task)) for task in cluster.tasks]
    [expected] = run([Plan(str(undisturbed), plan.epochs)])
    assert found == [it["variables"] for it in expected]
