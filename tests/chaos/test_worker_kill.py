"""Workers that are killed in a synchronous job: the others go on when the heartbeat timeout of the dead one ends."""

import random
import threading
import time
from collections.abc import Callable
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


def longest_wait(client: shoal.Client, victim: str, seen: Callable[[], int]) -> float:
    """Returns the longest time between two steps, from now until the others make steps without the victim.

    Its trainer may finish a step before it ends, too.
    """
    longest, stepped_at, value, lost_value = 0.0, time.monotonic(), seen(), 0

    def steps_without_it() -> bool:
        nonlocal longest, stepped_at, value, lost_value
        now, found = time.monotonic(), seen()
        longest = max(longest, now - stepped_at)
        if found > value:
            stepped_at, value = now, found
        is_lost = any(member.member == victim and not member.alive for member in client.status().members)
        lost_value = lost_value or (found if is_lost else 0)
        return bool(lost_value) and found > lost_value + 2 * BATCH

    wait_until(steps_without_it, what=f"steps without {victim}", timeout_s=60)
    return longest


@pytest.mark.timeout(60 + 20 * KILLS)
def test_steps_go_on_after_the_heartbeat_timeout_of_a_killed_worker(
    small_cluster: shoal.LocalCluster, tmp_path: Path
) -> None:
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
        with run_lengths.count_runs("worker_kill", KILLS, "s between two steps") as rows:
            for _ in range(KILLS):
                wait_until(both_train, what="two workers")
                begun = seen()
                wait_until(lambda: seen() >= begun + 4 * BATCH, what="steps of both")  # noqa: B023
                pause.wait(chance.uniform(0.0, 4 * STEP_S))  # the moment is what is random
                victim = chance.randrange(2)
                small_cluster.kill("worker", victim)
                took.append(longest_wait(client, f"worker-{victim}", seen))
                assert took[-1] <= HEARTBEAT_TIMEOUT_S + 1.0
                small_cluster.restart("worker", victim)
                rows.passes(took[-1])
            rows.spreads("s between two steps", took)
        print(f"{KILLS} workers killed; the next step took at most {max(took):.2f} s")
        job.cancel()
