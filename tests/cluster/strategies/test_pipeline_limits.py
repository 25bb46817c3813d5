"""A model that one process has no memory for trains in stages, each in a process under the same limit."""

import json

import pytest

from support.clusters.local import ROOT
from support.clusters.task_cluster import TaskCluster
from support.run_lengths import long_only

pytestmark = pytest.mark.cluster

TASK = ROOT / "tests/support/programs/limited_task.py"
# The model has 113 MB of variables. With gradients and the slots of Adam, it needs four times as much.
LIMIT_MB = 350


@long_only
def test_a_model_that_exceeds_the_memory_of_one_process_trains_in_four_under_the_same_limit() -> None:
    environment = {"LIMIT_MB": str(LIMIT_MB), "OPENBLAS_NUM_THREADS": "1"}
    with TaskCluster(TASK, {"worker": 1}, environment) as alone:
        assert json.loads(alone.output(alone.tasks[0])) == {"error": "MemoryError"}
    with TaskCluster(TASK, {"worker": 4}, environment) as cluster:
        found = [json.loads(cluster.output(task, timeout_s=120)) for task in cluster.tasks]
    assert all(it == found[0] for it in found)
    assert found[0]["held"] == [4, 3, 2, 1]
    assert max(found[0]["peak_bytes"]) < LIMIT_MB * 10**6 / 2
