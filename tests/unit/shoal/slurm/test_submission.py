"""Checks of a submission, before submitit is needed."""

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal import errors, slurm

JOB = shoal.Job("digits:Digits", name="digits", workers=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tasks_per_node": 2}, r"has 2 tasks, but a coordinator, 1 server and 2 workers need 4: 2 tasks more"),
        ({"nodes": 2, "tasks_per_node": 1}, r"has 2 tasks.* need 4"),
        ({"workers": 1}, "has 1 worker, but the job digits waits for 2"),
        ({"servers": 0}, "servers"),
        ({"path": "missing"}, "path .*missing' is not a folder"),
        ({"flags": {"trainer": ["--x"]}}, "flags has 'trainer'"),
        ({"flags": {"worker": "--x"}}, "flags has 'worker'"),
        ({"start_timeout_s": -1.0}, "start_timeout_s"),
    ],
)
def test_refuses_what_cannot_run(tmp_path: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.BadRequest, match=message):
        slurm.submit(JOB, folder=tmp_path / "run", **arguments)
    assert not (tmp_path / "run").exists()
