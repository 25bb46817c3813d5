"""Workers of a ClusterCoordinator that are killed and started again: every scheduled call has one result."""

import json
import random
import time
from functools import partial
from pathlib import Path

import pytest

from support import run_lengths
from support.clusters.local import ROOT
from support.clusters.task_cluster import TaskCluster
from support.programs import scheduled_steps
from support.run_lengths import count_runs
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

PERIOD_S = 5.0
LONGEST_S = 90.0


def is_past(due: float) -> bool:
    return time.monotonic() >= due


def test_every_result_comes_once_though_workers_are_killed(tmp_path: Path) -> None:
    draw = random.Random(1)
    counts = {"chief": 1, "ps": 1, "worker": run_lengths.size(2, 3)}
    workers = [("worker", number) for number in range(counts["worker"])]
    script, environment = ROOT / "tests/support/programs/scheduled_steps.py", {"FOLDER": str(tmp_path)}
    with (
        count_runs("schedule", count := run_lengths.runs(1, 12), "s") as counted,
        TaskCluster(script, counts, environment) as cluster,
    ):

        def all_run_steps() -> bool:
            for task in cluster.tasks[: -len(workers)]:
                cluster.check_runs(task)
            for task in workers:  # such as one that found no place in the job in time
                print(cluster.revive(task), end="")
            return all((tmp_path / str(cluster.pid(task))).exists() for task in workers)

        def wait_for_all() -> None:
            wait_until(all_run_steps, timeout_s=LONGEST_S, what="all workers run steps")

        wait_for_all()
        first = time.monotonic()
        for number in range(count):
            due = first + number * PERIOD_S
            wait_until(partial(is_past, due), what="the next kill")
            killed = draw.choice(workers)
            cluster.kill(killed)
            cluster.start(killed)
        began = time.monotonic()
        wait_for_all()
        back_s = time.monotonic() - began
        (tmp_path / "stop").touch()
        chief, *others = (json.loads(cluster.output(task, LONGEST_S)) for task in cluster.tasks if task[0] != "ps")
        assert others == [chief] * len(workers)
        scheduled_steps.check(chief)
        results = len(chief["results"])
        assert results <= chief["steps"] <= results + count  # a killed worker may have pushed without a result
        counted.passes(back_s, count)
