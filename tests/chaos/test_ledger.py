"""Ledger and variables of a job: each sample is visited once an epoch, and at least once when workers are killed."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import optim
from shoal.consistency import Consistency
from support import run_lengths
from support.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.chaos]

SIZE, EPOCHS = run_lengths.size(2_048, 4_096), 2
KILLS = run_lengths.runs(2, 30)


def counting(gate: Path, **options: Any) -> shoal.Job:
    """Returns a job that counts its samples. Its steps are slow until the file `gate` exists."""
    settings: dict[str, Any] = {"gate": str(gate), "seconds": 0.02, "size": SIZE}
    return shoal.Job(
        "support.programs.broken:Paced",
        settings=settings,
        optimizer=optim.SGD(1.0),
        batch_size=4,
        range_size=32,
        epochs=EPOCHS,
        workers=2,
        min_workers=1,
        **options,
    )


@pytest.fixture
def client(small_cluster: shoal.LocalCluster) -> Iterator[shoal.Client]:
    with small_cluster.client() as client:
        yield client


def check_account(job: shoal.JobHandle) -> None:
    """Checks that all ranges are done and none is leased."""
    account = job.data()
    assert (account.total.done, account.in_progress, account.held) == (SIZE * EPOCHS, {}, ())


@run_lengths.long_only
@pytest.mark.parametrize("mode", [shoal.Synchronous(), shoal.Asynchronous()], ids=str)
def test_every_sample_is_visited_exactly_once_an_epoch_without_kills(
    client: shoal.Client, tmp_path: Path, mode: Consistency
) -> None:
    gate = tmp_path / "gate"
    gate.touch()
    job = client.submit(counting(gate, consistency=mode))
    job.wait(timeout_s=120)
    np.testing.assert_array_equal(client.pull(job)["seen"], EPOCHS)
    check_account(job)


@pytest.mark.timeout(120 + 20 * KILLS)
def test_every_sample_is_visited_at_least_once_an_epoch_with_kills(
    small_cluster: shoal.LocalCluster, client: shoal.Client, tmp_path: Path
) -> None:
    """Random workers are killed at random moments. New jobs are submitted until there were enough kills."""
    kills, seed = 0, random.randrange(2**32)
    chance, pause = random.Random(seed), threading.Event()
    print(f"seed {seed}")
    with run_lengths.count_runs("worker_kill_ledger", KILLS, "samples once more in a job") as counted:
        while kills < KILLS:
            gate, before = tmp_path / f"gate-{kills}", kills
            job = client.submit(counting(gate, consistency=chance.choice([shoal.Synchronous(), shoal.Asynchronous()])))
            wait_until(lambda: job.data().total.done > 0, what="the first range's end", timeout_s=60)  # noqa: B023
            while kills < KILLS and job.data().total.unleased > SIZE // 4:
                pause.wait(chance.uniform(0.0, 1.0))  # the moment is what is random
                victim = chance.randrange(2)
                small_cluster.restart("worker", victim)
                kills += 1
            gate.touch()
            job.wait(timeout_s=120)
            seen = client.pull(job)["seen"]
            assert seen.min() >= EPOCHS, f"seed {seed}: a sample was never trained on"
            check_account(job)
            again = int(seen.sum()) - SIZE * EPOCHS
            print(f"{kills} kills; {again} samples were trained on once more, of {SIZE * EPOCHS}")
            client.drop(job)
            counted.passes(again, kills - before)
