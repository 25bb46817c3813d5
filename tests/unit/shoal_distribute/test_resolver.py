"""Cluster resolvers: TF_CONFIG and given values, the order of ranks, and errors for what cannot be."""

import contextlib
import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal import errors
from shoal_distribute.resolver import (
    ClusterSpec,
    RankedTasks,
    SimpleClusterResolver,
    TFConfigClusterResolver,
    ranked_tasks,
)

CLUSTER = {"worker": ["w0.example:1", "w1.example"], "ps": ["p0.example:2"], "chief": ["[fd00::1]"]}


def resolver(
    kind: object = "worker", index: object = 0, cluster: Any = None, **options: Any
) -> TFConfigClusterResolver:
    value = {"cluster": CLUSTER if cluster is None else cluster, "task": {"type": kind, "index": index}}
    return TFConfigClusterResolver(environment={"TF_CONFIG": json.dumps(value)}, **options)


def test_tf_config_says_who_this_process_is() -> None:
    found = resolver("worker", "1")
    assert (found.task_type, found.task_id) == ("worker", 1)
    spec = found.cluster_spec()
    assert spec.jobs == ["chief", "ps", "worker"]
    assert spec.job_tasks("worker") == ["w0.example:1", "w1.example:7090"]
    assert spec.task_address("chief", 0) == "[fd00::1]:7090"
    assert spec.task_indices("worker") == [0, 1]


def test_ranks_are_the_chief_and_then_the_workers() -> None:
    addresses = ("[fd00::1]:7090", "w0.example:1", "w1.example:7090")
    assert ranked_tasks(resolver("chief", 0)) == RankedTasks(0, addresses)
    assert ranked_tasks(resolver("worker", 1)) == RankedTasks(2, addresses)


def test_workers_alone_are_enough() -> None:
    found = ranked_tasks(resolver("worker", 1, {"worker": ["localhost:1", "localhost:2"]}))
    assert found == RankedTasks(1, ("localhost:1", "localhost:2"))


def test_a_process_without_tf_config_trains_alone() -> None:
    alone = TFConfigClusterResolver(environment={})
    assert (alone.task_type, alone.task_id, bool(alone.cluster_spec())) == (None, None, False)
    assert ranked_tasks(alone) is None


def test_arguments_replace_the_task() -> None:
    assert ranked_tasks(resolver("ps", 0, task_type="worker", task_id=1)) == ranked_tasks(resolver("worker", 1))


@pytest.mark.parametrize(
    ("kind", "index", "cluster", "said"),
    [
        ("worker", 2, None, "task.index is 2, but cluster.worker lists 2"),
        ("evaluator", 0, None, "cluster lists no evaluator"),
        ("worker", 0, {"worker": ["a", "a"]}, "cluster.worker[0] and cluster.worker[1] are both a:7090"),
        ("worker", 0, {"worker": ["a:0"]}, "cluster.worker[0] is 'a:0'"),
        ("worker", 0, {"worker": []}, "give a list of one or more addresses"),
    ],
)
def test_what_cannot_be_is_refused(kind: str, index: int, cluster: Any, said: str) -> None:
    with pytest.raises(errors.BadRequest, match=re.escape(said)):
        resolver(kind, index, cluster)


def test_a_parameter_server_is_no_rank() -> None:
    with pytest.raises(errors.BadRequest, match="task 0 of type ps; only tasks of the types chief, master"):
        ranked_tasks(resolver("ps", 0))


def test_a_simple_resolver_has_what_it_is_given() -> None:
    spec = ClusterSpec({"worker": ["a", "b:5"]})
    assert spec == ClusterSpec(spec.as_dict())
    assert ranked_tasks(SimpleClusterResolver(spec, "worker", 1)) == RankedTasks(1, ("a:7090", "b:5"))
    with pytest.raises(errors.BadRequest, match="no task 2 of type worker"):
        SimpleClusterResolver(spec, "worker", 2)
    with pytest.raises(errors.BadRequest, match="no tasks of type 'chief'; it has worker"):
        SimpleClusterResolver(spec, "chief", 0)
    with pytest.raises(errors.BadRequest, match="task None of type None"):
        ranked_tasks(SimpleClusterResolver(spec))


@pytest.mark.parametrize("listed", ["a:1", [], ["http://a:1"], ["a:b"], [7], [""]])
def test_a_spec_has_lists_of_addresses(listed: Any) -> None:
    with pytest.raises(errors.BadRequest, match="give"):
        ClusterSpec({"worker": listed})


TYPES = st.sampled_from(["chief", "master", "ps", "worker", "evaluator"])
ADDRESSES = st.sampled_from(["a:1", "b", "c:2", "[::1]:4", "[::1]", "e:0", ""])


@given(st.dictionaries(TYPES, st.lists(ADDRESSES, max_size=3), max_size=4), TYPES, st.integers(-1, 3))
def test_each_rank_of_a_cluster_has_its_own_place(cluster: Any, kind: str, index: int) -> None:
    with contextlib.suppress(errors.BadRequest):
        tasks = ranked_tasks(resolver(kind, index, cluster))
        assert tasks is not None
        assert tasks.addresses[tasks.rank].startswith(cluster[kind][index])
        assert len(set(tasks.addresses)) == len(tasks.addresses)
