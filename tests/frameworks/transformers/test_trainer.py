"""`shoal.transformers.distribute`: the results of a plain `Trainer`, and its resume. Each worker is a process."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal.events import MetricsReported
from support.clusters.local import ROOT, local_cluster

PROGRAM = Path(__file__).with_name("trainer_training.py")
SAMPLES = 24
ARGUMENTS = {"learning_rate": 1e-2, "weight_decay": 0.1, "save_strategy": "no", "logging_steps": 1}


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shoal.Client]:
    """A cluster with checkpoint storage."""
    slow = {"coordinator": ["--heartbeat-timeout", "30"]}  # frameworks take all cores while they load
    folder = tmp_path_factory.mktemp("checkpoints")
    with local_cluster(servers=2, workers=0, flags=slow, checkpoints=folder) as cluster, cluster.client() as client:
        yield client


def train(folder: Path, client: shoal.Client, *workers: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Runs workers at the same time, and returns what they print, with their weights."""
    environ = {**os.environ, "SHOAL_COORDINATOR": client.address, "OMP_NUM_THREADS": "1"}
    given = [{**options, **it, "weights": str(folder / f"{number}.npz")} for number, it in enumerate(workers)]
    started = [
        subprocess.Popen([sys.executable, PROGRAM, json.dumps(it)], env=environ, stdout=subprocess.PIPE, cwd=ROOT)
        for it in given
    ]
    found = []
    for one, its in zip(started, given, strict=True):
        output = one.communicate(timeout=110)[0].decode()
        assert one.returncode == 0
        with np.load(its["weights"]) as weights:
            found.append({**json.loads(output.splitlines()[-1]), "weights": dict(weights)})
    return found


def farthest(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


@pytest.mark.parametrize("kind", ["linear", "cosine", "inverse_sqrt"])
def test_two_workers_train_as_a_plain_trainer(client: shoal.Client, tmp_path: Path, kind: str) -> None:
    """With clipping, groups without weight decay, a warm-up, and two backward passes in each step of each worker."""
    common = {**ARGUMENTS, "num_train_epochs": 12, "max_grad_norm": 0.5, "warmup_steps": 3, "lr_scheduler_type": kind}
    common["gradient_accumulation_steps"] = 2
    alone, *both = train(
        tmp_path,
        client,
        {"arguments": {**common, "per_device_train_batch_size": 12, "output_dir": str(tmp_path / "alone")}},
        *[
            {
                "arguments": {**common, "per_device_train_batch_size": 6, "output_dir": str(tmp_path / "both")},
                "distribute": {"job": f"trainer-{kind.replace('_', '-')}", "workers": 2},
            }
        ]
        * 2,
    )
    assert [it["steps"] for it in (alone, *both)] == [12] * 3
    for it in both:
        assert farthest(alone["weights"], it["weights"]) <= 1e-10
        rates = [its["learning_rate"] for its in it["log"]]
        assert rates == pytest.approx([its["learning_rate"] for its in alone["log"]], abs=1e-12)
    assert client.job(f"trainer-{kind.replace('_', '-')}").data().total.done == 12 * SAMPLES


def test_the_job_has_the_metrics_that_the_trainer_logs(client: shoal.Client, tmp_path: Path) -> None:
    arguments = {**ARGUMENTS, "num_train_epochs": 1, "per_device_train_batch_size": 8, "output_dir": str(tmp_path)}
    storing = {**arguments, "save_strategy": "epoch"}  # the cluster has no storage for checkpoints of the job
    (told,) = train(tmp_path, client, {"arguments": storing, "distribute": {"job": "trainer-metrics"}})
    assert [it.name for it in tmp_path.glob("checkpoint-3/*.json") if it.name != "config.json"]
    assert not (tmp_path / "checkpoint-3" / "shoal.json").exists()
    reports = [it for it in client.job("trainer-metrics").events() if isinstance(it, MetricsReported) and it.values]
    losses = [its["loss"] for its in told["log"]]
    reported = [it.values["loss"] for it in reports if "loss" in it.values]  # each the mean of some steps
    assert reported
    assert all(min(losses) <= it <= max(losses) for it in reported)


def test_a_resumed_job_goes_on_where_it_was(stored: shoal.Client, tmp_path: Path) -> None:
    """In the middle of an epoch, with the moments, the schedule and the position in the data."""
    common = {**ARGUMENTS, "num_train_epochs": 4, "per_device_train_batch_size": 6}

    def worker(name: str, **options: Any) -> dict[str, Any]:
        return {"arguments": {**common, "output_dir": str(tmp_path / name), **options}}

    whole = train(tmp_path, stored, *[worker("whole")] * 2, distribute={"job": "trainer-whole", "workers": 2})
    assert [it["steps"] for it in whole] == [8, 8]
    saves = {"save_strategy": "steps", "save_steps": 3}
    job = {"job": "trainer-broken", "workers": 2}
    places = ["broken", "other"]
    broken = train(tmp_path, stored, *[worker(it, **saves) for it in places], distribute=job, stop=4)
    assert {it["error"] for it in broken} == {"stopped"}
    assert "stopped" in stored.job("trainer-broken").status().reason
    (folder,) = tmp_path.glob("*/checkpoint-3")  # of rank 0 alone
    assert json.loads((folder / "shoal.json").read_text()) == {"job": "trainer-broken", "checkpoint": 1, "step": 3}
    resumed = train(tmp_path, stored, *[worker(it, **saves) for it in places], distribute=job, resume=str(folder))
    for it in resumed:
        assert (it["steps"], it["epoch"]) == (8, 4.0)
        assert farthest(whole[0]["weights"], it["weights"]) <= 1e-12
        assert [its["step"] for its in it["log"]] == [*range(1, 9)]
    assert stored.job("trainer-broken").data().total.done == 4 * SAMPLES
