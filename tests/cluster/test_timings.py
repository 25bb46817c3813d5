"""Step timings of real processes: they name the worker that delays the others, and the phase that is slow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.consistency import Consistency
from shoal.events import LogLine
from shoal.status import Role, ServerLoad
from support.scraping import sample
from support.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("mode", [shoal.Synchronous(), shoal.Asynchronous()], ids=str)
def test_timings_name_the_slow_worker(client: shoal.Client, tmp_path: Path, mode: Consistency) -> None:
    settings: dict[str, Any] = {"mark": str(tmp_path / "mark"), "seconds": 0.005}
    job = client.submit(
        shoal.Job("support.programs.broken:OneSlow", settings=settings, workers=3, consistency=mode, max_steps=20)
    )
    job.wait(timeout_s=60)
    (slow,) = (event.worker for event in job.events(follow=False) if isinstance(event, LogLine))
    timings = job.timings()
    assert [[timing.step for timing in steps] for steps in timings.steps.values()] == [[*range(20)]] * 3
    found = timings.straggler()
    assert found
    assert (found.worker, found.phase) == (slow, "compute")
    assert found.seconds == pytest.approx(0.045, rel=0.5)
    assert found.ratio > 2
    assert sum(timings.staleness.values()) == job.status().progress.steps


def test_heartbeats_carry_the_load_of_servers(shared_cluster: shoal.LocalCluster, client: shoal.Client) -> None:
    """The status has the load of the last heartbeat. The test compares it with the servers' own metrics."""

    def said(field: str) -> int:
        return sum(getattr(member.load, field) for member in client.status().members)

    def so_far(field: str) -> float:
        pages = [page for name, page in shared_cluster.metrics.items() if name.startswith("server")]
        return sum(sample(page, f"shoal_server_{field}_total") for page in pages)

    before = {field: so_far(field) for field in ("updates", "received_bytes", "sent_bytes")}
    with client.session("load", variables={"w": shoal.Variable((1_000,))}, shards=1) as session:
        for _ in range(4):
            session.pull()
            session.push({"w": np.ones(1_000, np.float32)})
    wait_until(lambda: said("updates") == before["updates"] + 4, what="a heartbeat that tells of 4 updates")
    assert said("received_bytes") - before["received_bytes"] == said("sent_bytes") - before["sent_bytes"] == 16_000
    assert {member.load for member in client.status().members if member.role is not Role.SERVER} == {ServerLoad()}
