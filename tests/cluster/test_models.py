"""Programs of `shoal_nn` in jobs of real processes: an image model that is trained and fine-tuned, and a table."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shoal
from shoal import optim
from shoal.consistency import Consistency
from shoal.status import JobResult
from support.clusters.local import local_cluster
from support.programs.model_data import bright, pairs

pytestmark = pytest.mark.cluster

IMAGES = {"format": "npz", "model": "mobilenet_v2", "options": {"width": 0.35}, "classes": 2}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[shoal.Client]:
    with local_cluster(2, 2, checkpoints=tmp_path_factory.mktemp("checkpoints")) as cluster, cluster.client() as client:
        yield client


def train(
    client: shoal.Client, factory: str, settings: dict[str, Any], **options: Any
) -> tuple[JobResult, dict[str, np.ndarray]]:
    """Runs a job to its end. Returns its result and its variables."""
    job = client.submit(
        shoal.Job(
            f"shoal_nn.programs:{factory}",
            workers=2,
            settings=settings,
            **{"optimizer": optim.Adam(0.002), "batch_size": 16, **options},
        )
    )
    return job.wait(60), job.pull()


def test_a_model_is_fine_tuned_its_head_alone_and_then_whole(client: shoal.Client, tmp_path: Path) -> None:
    data = {"data": bright(tmp_path / "bright.npz", 160, channels=3)}
    judged = {"evaluation": shoal.EvaluationPolicy(metric="accuracy")}
    first, whole = train(client, "image_classifier", {**data, **IMAGES}, **judged)
    assert first.evaluation
    assert first.evaluation.samples == 16
    assert first.evaluation.values.keys() == {"loss", "accuracy"}

    new = {**data, **IMAGES, "head": "digits"}
    begin = {"restore": first.job, "partial_restore": True}
    second, head_only = train(client, "image_classifier", {**new, "train_from": "digits"}, **begin, **judged)
    kept = whole.keys() - {"head/kernel", "head/bias"}
    assert head_only.keys() - kept == {"digits/kernel", "digits/bias"}
    assert all(head_only[name].tobytes() == whole[name].tobytes() for name in kept), "statistics, too"
    assert head_only["digits/bias"].any(), "it begins with zeros"

    begin = {"restore": second.job, "partial_restore": True}
    third, everything = train(client, "image_classifier", new, **begin, optimizer=optim.SGD(0.01))
    assert everything.keys() == head_only.keys()
    still = [name for name in everything if everything[name].tobytes() == head_only[name].tobytes()]
    assert not still
    assert third.progress.steps > 0


@pytest.mark.parametrize("mode", [shoal.Asynchronous(), shoal.BoundedStaleness(2), shoal.Synchronous()])
def test_no_worker_replaces_what_others_added_to_an_average(client: shoal.Client, mode: Consistency) -> None:
    program, steps = "support.programs.recovery:Average", 50
    job = client.submit(shoal.Job(program, workers=2, max_steps=steps, consistency=mode, optimizer=optim.SGD(0.1)))
    job.wait(60)
    np.testing.assert_allclose(job.pull()["mean"], steps)


def test_a_table_is_learned_asynchronously_and_the_best_is_by_auc(client: shoal.Client, tmp_path: Path) -> None:
    settings = {
        "data": pairs(tmp_path / "train.parquet", 2000, 2),
        "held_out": pairs(tmp_path / "test.parquet", 300, 3),
        "label": "label",
        "categories": {"a": 12, "b": 12, "flag": 2},
        "numbers": {"age": [50, 20]},
        "crosses": [["a", "b"]],
        "hidden": [8],
    }
    result, _ = train(
        client,
        "wide_and_deep",
        settings,
        consistency=shoal.Asynchronous(),
        optimizer=optim.Adam(0.02),
        epochs=4,
        evaluation=shoal.EvaluationPolicy(every_steps=50, metric="auc"),
    )
    assert result.best
    assert result.evaluation
    assert result.best.values.keys() == {"loss", "accuracy", "auc"}
    assert result.best.values["auc"] >= result.evaluation.values["auc"] > 0.9
    assert result.evaluation.samples == 300


def test_steps_that_overflow_in_float16_are_rejected_until_a_scale_fits(client: shoal.Client, tmp_path: Path) -> None:
    settings = {"data": bright(tmp_path / "bright.npz"), "format": "npz", "model": "mlp", "classes": 2}
    # Gradients by so many units, of so few that come before them, are large.
    large = {"std": 0.01, "precision": "float16", "options": {"hidden": [2, 2048]}}
    result, values = train(client, "image_classifier", {**settings, **large}, batch_size=1)
    assert 0 < result.progress.rejected < result.progress.steps
    assert all(np.isfinite(value).all() for value in values.values())


def test_label_without_a_class_fails_the_job_with_the_reason(client: shoal.Client, tmp_path: Path) -> None:
    path = tmp_path / "images.npz"
    np.savez(path, images=np.zeros((40, 8, 8), np.uint8), labels=np.arange(40) // 4)
    settings = {"data": str(path), "format": "npz", "model": "mlp", "classes": 9}
    with pytest.raises(shoal.JobFailed, match=r"dataset\.batch.* InvalidData: the label 9 is not one of .* 9 classes"):
        train(client, "image_classifier", settings)
