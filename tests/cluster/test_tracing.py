"""Traces of a cluster whose environment names a collector: the spans of a step from all roles are in one trace."""

from collections.abc import Mapping, Sequence

import pytest

import shoal
from support.clusters.local import local_cluster
from support.traces import Seen, collector, roots, tree
from support.waiting import wait_until

pytestmark = pytest.mark.cluster


def below_first(spans: Sequence[Seen]) -> Mapping[str, int]:
    """Returns the spans of the first step so far; none while a span's parent has not arrived yet."""
    steps = roots(spans, "step")
    try:
        return tree(spans, steps[0]) if steps else {}
    except KeyError:
        return {}


def test_a_steps_trace_comes_from_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "SHOAL_TRACING"):
        monkeypatch.delenv(name, raising=False)
    with collector() as (received, variables):
        soon = {**variables, "OTEL_BSP_SCHEDULE_DELAY": "100"}  # milliseconds
        with local_cluster(servers=1, workers=1, env=soon) as cluster, cluster.client() as client:
            job = shoal.Job("support.programs.traced:Traced", name="j", batch_size=4, overlap=False)
            client.submit(job).wait(60)
            wait_until(lambda: "push/Push/assemble" in below_first(received.spans), what="the first step's spans")
        first = roots(received.spans, "step")[0]
        below = tree(received.spans, first)
        sources = received.sources(first.trace)
        instances = received.instances
    assert {"wait/Lease/Lease", "pull/Pull/wait", "read", "compute", "push/Push/assemble"} <= below.keys()
    assert {
        ("shoal-worker", "step"),
        ("shoal-worker", "Lease"),
        ("shoal-coordinator", "Lease"),
        ("shoal-server", "Pull"),
        ("shoal-server", "Push"),
    } <= sources
    assert {service for service, _ in instances} == {"shoal-coordinator", "shoal-server", "shoal-worker"}
    assert {member for service, member in instances if service != "shoal-coordinator"} == {"server-0", "worker-0"}
