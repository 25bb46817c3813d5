"""Link from a checkpoint folder of a `Trainer` to the checkpoint of the job at the same step."""

import json
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from shoal import errors

# File of a checkpoint folder that names the job's checkpoint.
FILE = "shoal.json"


def write_link(folder: Path, job: str, number: int, step: int) -> None:
    """Writes into a checkpoint folder which checkpoint of the job belongs to it."""
    (folder / FILE).write_text(json.dumps({"job": job, "checkpoint": number, "step": step}) + "\n")


def restore_of(resume: Any, output_dir: str) -> str:
    """Returns the checkpoint of a job that belongs to one of a trainer, as `restore` of a session takes it.

    Args:
        resume: `resume_from_checkpoint` of `Trainer.train`.
        output_dir: where the trainer writes its checkpoints.

    Returns:
        "JOB/NUMBER", or "" if the trainer does not resume.

    Raises:
        BadRequest: the folder does not say which checkpoint of a job belongs to it.
    """
    found = get_last_checkpoint(output_dir) if resume is True else resume
    if not found:
        return ""  # True without a checkpoint is an error of `Trainer`
    path = Path(found) / FILE
    try:
        told = json.loads(path.read_text())
        return f"{told['job']}/{int(told['checkpoint'])}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.BadRequest(
            f"{path} does not name a checkpoint of a job ({error!r}), and the moments of the optimizer are only there; "
            "train on a cluster with checkpoint storage (--checkpoints), or begin again from these weights: "
            "from_pretrained, and no resume_from_checkpoint"
        ) from None


__all__ = ["FILE", "restore_of", "write_link"]
