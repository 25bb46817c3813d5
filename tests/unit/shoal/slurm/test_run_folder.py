"""The folder of a run: its files, their modes, and who may use it."""

import errno
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal import errors
from shoal.slurm import _run_folder, _shared_files
from shoal.slurm._allocation import Allocation
from shoal.slurm._coordinator_task import resumed
from shoal.slurm._run_folder import Announcement, Phase, RunFolder, RunPlan
from shoal.v1 import job_pb2

JOB = shoal.Job("digits:Digits", name="digits", workers=2, settings={"hidden": 32}, optimizer=shoal.optim.Adam(0.003))


def plan(**changes: Any) -> RunPlan:
    flags = {"worker": ["--device", "cpu"]}
    fields: dict[str, Any] = {"job": JOB, "servers": 1, "workers": 2, "path": ("/programs",), "flags": flags}
    return RunPlan(**(fields | changes))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    found = RunFolder(tmp_path / "run")
    found.prepare(plan())
    return found


def test_the_plan_is_read_as_it_was_written(folder: RunFolder) -> None:
    assert folder.plan() == plan()


def test_only_the_user_can_access_it(folder: RunFolder) -> None:
    folder.announce(Announcement(run="1", attempt="1.0", address="node:7"))
    folder.report_failure("1.0", "worker-0", "no GPU")
    folder.mark_unfinished("1.0", 0)
    with folder.claim(Allocation(run="1", attempt="1.0", rank=0, tasks=4)):
        pass
    for path in (folder.path, *folder.path.rglob("*")):
        mode = stat.S_IMODE(path.stat().st_mode)
        public = path.suffix == ".pem" and not path.stem.endswith("-key")  # certificates are no secrets
        assert mode == (0o700 if path.is_dir() else 0o644 if public else 0o600), path


def test_a_second_submission_keeps_the_certificates(folder: RunFolder) -> None:
    before = folder.pair("admin")[0].read_bytes()
    folder.prepare(plan(workers=4))
    assert folder.pair("admin")[0].read_bytes() == before
    assert folder.plan().workers == 4


def test_a_submission_keeps_its_plan_when_a_later_one_waits_in_the_queue(folder: RunFolder) -> None:
    folder.prepare(plan(servers=2), "417")
    folder.prepare(plan(servers=3), "418")
    assert [folder.plan(run).servers for run in ("417", "418", "", "one without a plan of its own")] == [2, 3, 3, 3]


def test_a_file_server_that_does_not_answer_for_a_moment_ends_nothing(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, held = (
        Announcement(run="1", attempt="1.0", address="node:7"),
        Allocation(run="1", attempt="1.0", rank=0, tasks=4),
    )
    waits = list[float]()

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def recover(pause_s: float) -> None:
        waits.append(pause_s)
        if len(waits) == 3:
            away.undo()

    away = pytest.MonkeyPatch()
    away.setattr(_run_folder, "atomic_write", fail)
    monkeypatch.setattr(_shared_files, "time", SimpleNamespace(sleep=recover))
    folder.announce(said)
    assert waits == [1.0] * 3
    with folder.claim(held) as claim, monkeypatch.context() as unread:
        for name in ("read_bytes", "read_text"):
            unread.setattr(Path, name, fail)
        unread.setattr(os, "listdir", fail)
        assert folder.announced("1.0") is None
        assert folder.failures("1.0") == []
        assert claim.held
    assert folder.announced("1.0") == said
    monkeypatch.setattr(_run_folder, "atomic_write", fail)
    with pytest.raises(OSError, match="Input/output"):
        folder.announce(said)
    assert len(waits) == 23, "a file server that stays away ends the task"


def test_checkpoints_are_in_the_folder_of_the_run_or_where_the_plan_says(folder: RunFolder) -> None:
    assert folder.checkpoints(plan()) == f"{folder.path}/checkpoints"
    folder.prepare(plan(checkpoints="s3://bucket/digits"), "417")
    assert folder.checkpoints(folder.plan("417")) == "s3://bucket/digits"


def test_it_has_the_run_of_one_job(folder: RunFolder) -> None:
    with pytest.raises(errors.BadRequest, match="has the run of the job digits, not of other"):
        folder.prepare(plan(job=shoal.Job("digits:Digits", name="other")))


@pytest.mark.parametrize("mode", [0o770, 0o755, 0o710])
def test_a_folder_that_others_can_access_is_refused(folder: RunFolder, mode: int) -> None:
    folder.path.chmod(mode)
    for use in (folder.plan, lambda: folder.prepare(plan())):
        with pytest.raises(errors.BadRequest, match=f"has the mode {mode:o}, so others than user.*run: chmod 700 /"):
            use()


def test_an_empty_folder_becomes_private(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    RunFolder(tmp_path).prepare(plan())
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def test_the_group_has_no_access_though_it_has_to_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_FILE_ACCESS", "group")
    RunFolder(tmp_path / "run").prepare(plan())
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(errors.BadRequest, match="cannot read the run in"):
        RunFolder(tmp_path / "missing").plan()


def test_announcements_belong_to_an_attempt(folder: RunFolder) -> None:
    assert folder.announced() is None
    said = Announcement(run="1", attempt="1.0", address="node:7", phase=Phase.STOPPING)
    folder.announce(said)
    assert folder.announced() == folder.announced("1.0") == said
    assert folder.announced("1.1") is None


def test_failures_belong_to_an_attempt(folder: RunFolder) -> None:
    folder.report_failure("1.0", "worker-0", "no GPU")
    folder.report_failure("12.0", "worker-0", "no disk")
    assert folder.failures("1") == folder.failures("1.0") == ["worker-0: no GPU"]
    assert not folder.failures("1.1")


@pytest.mark.parametrize(("state", "kept"), [("SUCCEEDED", True), ("CANCELLED", True), ("FAILED", False)])
def test_a_start_forgets_that_the_job_failed(folder: RunFolder, state: str, kept: bool) -> None:
    folder.end("1", job_pb2.JobStatus(spec=JOB.to_proto(), state=job_pb2.JobState.Value(state)))
    folder.forget_failed_job("1")
    assert (folder.outcome("1") is not None) == kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"workers": 1}, "has 1 worker, but the job digits waits for 2"),
        ({"job": shoal.Job("a:b", name="two", replicas=2)}, "has 1 server, but the job two waits for 2"),
        ({"job": shoal.Job(name="session")}, "the job has no program"),
    ],
)
def test_a_plan_that_would_wait_forever_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.BadRequest, match=message):
        plan(**changes)


def test_a_job_without_checkpoints_keeps_its_own_start(folder: RunFolder) -> None:
    start = shoal.Job("digits:Digits", name="digits", restore="pretrained", partial_restore=True)
    assert resumed(start, shoal.Checkpoints(folder.checkpoints(plan()))) == start
