"""Workers that are killed in a synchronous job: the others go on when the heartbeat timeout of the dead one ends."""

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import optim
from support import run_lengths
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

KILLS = run_lengths.runs(1, 50)
# The heartbeat timeout of `small_cluster`.
HEARTBEAT_TIMEOUT_S = 3.0
BATCH, STEP_S = 8, 0.05


def paced(folder: Path) -> shoal.Job:
    """Returns a job of slow steps, which lasts longer than the test."""
    settings: dict[str, Any] = {"gate": str(folder / "never"), "seconds": STEP_S, "size": 4_096}
    return shoal.Job(
        "support.programs.broken:Paced",
        settings=settings,
        workers=2,
        min_workers=1,
        shards=2,
        optimizer=optim.SGD(1.0),
        consistency=shoal.Synchronous(),
        batch_size=BATCH,
        range_size=8 * BATCH,
        epochs=1_000,
    )


@pytest.mark.timeout(60 + 20 * KILLS)
def test_steps_go_on_when_the_lease_of_a_killed_worker_ends(small_cluster: shoal.LocalCluster, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    chance, pause = random.Random(seed), threading.Event()
    print(f"seed {seed}")
    with small_cluster.client() as client:
        job = client.submit(paced(tmp_path))

        def seen() -> int:
            return int(client.pull(job)["seen"].sum())

        def both_train() -> bool:
            return set(job.status().workers) == {"worker-0", "worker-1"} and job.status().progress.steps > 0

        took = []
        with run_lengths.count_runs("worker_kill", KILLS, "s until the next step") as rows:
            for _ in range(KILLS):
                wait_until(both_train, what="two workers")
                begun = seen()
                wait_until(lambda: seen() >= begun + 4 * BATCH, what="steps of both")  # noqa: B023
                pause.wait(chance.uniform(0.0, 4 * STEP_S))  # the moment is what is random
                victim = chance.randrange(2)
                small_cluster.kill("worker", victim)
                killed_at, before = time.monotonic(), seen()
                # One step may have had the victim's gradient already. The next one waits for the end of its lease.
                wait_until(lambda: seen() > before + 2 * BATCH, what=f"a step without worker-{victim}")  # noqa: B023
                took.append(time.monotonic() - killed_at)
                assert took[-1] <= HEARTBEAT_TIMEOUT_S + 1.0
                small_cluster.restart("worker", victim)
                rows.passes(took[-1])
        print(f"{KILLS} workers killed; the next step came within {max(took):.2f} s")
        job.cancel()
