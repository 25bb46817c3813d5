"""Clusters that the tasks of TF_CONFIG form, each by one script."""

import json
from pathlib import Path

import numpy as np

from shoal_distribute import OneDeviceStrategy
from support.clusters.local import ROOT
from support.clusters.task_cluster import TaskCluster
from support.programs import scheduled_steps
from support.programs.strategy_task import train

PROGRAMS = ROOT / "tests/support/programs"


def test_one_script_is_chief_server_and_worker() -> None:
    with TaskCluster(PROGRAMS / "strategy_task.py", {"chief": 1, "ps": 2, "worker": 1}) as cluster:
        outputs = [json.loads(cluster.output(task)) for task in (("worker", 0), ("chief", 0))]
    expected = train(OneDeviceStrategy("/cpu:0"), 1, 0)
    for output in outputs:
        np.testing.assert_allclose(output, expected, rtol=1e-10)


def test_a_chief_gives_scheduled_steps_to_workers(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    counts, environment = {"chief": 1, "ps": 1, "worker": 2}, {"FOLDER": str(tmp_path)}
    with TaskCluster(PROGRAMS / "scheduled_steps.py", counts, environment) as cluster:
        chief, *workers = (json.loads(cluster.output(task)) for task in cluster.tasks if task[0] != "ps")
    assert workers == [chief, chief]
    scheduled_steps.check(chief)
    assert [it.name for it in tmp_path.glob("written by *")] == ["written by chief"]
    assert len({pid for _, pid, _ in chief["results"]}) == 2
    assert chief["steps"] == scheduled_steps.BATCH  # the servers have applied each push once
