"""The decision whether the recipe for sbatch requeues a run."""

from pathlib import Path

import pytest

import shoal
from shoal.slurm._requeue import refusal
from shoal.slurm._run_folder import RunFolder, RunPlan
from shoal.v1 import job_pb2

JOB = shoal.Job("digits:Digits", name="digits")


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.prepare(RunPlan(job=JOB, servers=1, workers=1, path=("/programs",)))
    return found


def test_a_start_that_was_asked_to_end_is_requeued(folder: RunFolder) -> None:
    folder.mark_unfinished("41.0.0.0", 0)
    assert not refusal(folder, "41", "0", 3)


def test_a_task_that_failed_ends_the_run(folder: RunFolder) -> None:
    folder.mark_unfinished("41.0.0.0", 0)
    folder.mark_unfinished("417.1.0.0", 0)
    assert "one has failed" in refusal(folder, "41", "1", 3)


def test_a_job_that_has_ended_is_not_requeued(folder: RunFolder) -> None:
    folder.mark_unfinished("41.0.0.0", 0)
    folder.end("41", job_pb2.JobStatus(spec=JOB.to_proto(), state=job_pb2.FAILED))
    assert refusal(folder, "41", "0", 3) == "the job digits has ended: failed"


def test_starts_that_add_no_checkpoint_are_limited(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checkpoint is the newest one at the beginning of a start."""
    for restarts, checkpoint in enumerate((0, 1, 1, 1)):
        folder.mark_unfinished(f"41.{restarts}.0.0", checkpoint)
    monkeypatch.setattr(folder, "newest_checkpoint", lambda _: 2)
    assert not refusal(folder, "41", "3", 3)
    monkeypatch.setattr(folder, "newest_checkpoint", lambda _: 1)
    assert "3 allocations in a row ended without a new checkpoint" in refusal(folder, "41", "3", 3)
    assert not refusal(folder, "41", "3", 4)
