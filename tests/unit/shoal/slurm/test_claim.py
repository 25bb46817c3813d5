"""The claim on the folder of a run: one run has it, and others take it over only when that one has surely ended."""

import errno
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from shoal import errors
from shoal._system import private_files
from shoal.slurm import _claim, _shared_files
from shoal.slurm._allocation import Allocation
from shoal.slurm._claim import FolderClaim, Holder, refuse_other
from shoal.slurm._queue import Presence, presence


def place(run: str, restarts: int = 0) -> Allocation:
    return Allocation(run=run, attempt=f"{run}.{restarts}.0.0", rank=0, tasks=4)


def test_a_second_run_is_refused_until_the_first_one_has_ended(tmp_path: Path) -> None:
    with FolderClaim.take(tmp_path, place("1")):
        for use in (lambda: FolderClaim.take(tmp_path, place("2")), lambda: refuse_other(tmp_path)):
            with pytest.raises(errors.JobRunning, match=r"another allocation \(1, task 0 on .*remove .*/00000001"):
                use()
        refuse_other(tmp_path, "1")
    with FolderClaim.take(tmp_path, place("2")) as second:
        assert second.held


def test_a_file_server_that_fails_for_a_moment_does_not_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = [OSError(errno.EIO, "Input/output error"), OSError(errno.ESTALE, "Stale file handle")]
    create = private_files.create

    def fail_at_first(file: Path) -> int:
        if failures:
            raise failures.pop()
        return create(file)

    monkeypatch.setattr(private_files, "create", fail_at_first)
    monkeypatch.setattr(_shared_files, "time", SimpleNamespace(sleep=lambda _: None))
    with FolderClaim.take(tmp_path, place("1")) as claim:
        assert claim.held


def test_a_run_that_starts_while_another_one_ends_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FolderClaim.take(tmp_path, place("1")) as first, ThreadPoolExecutor(1) as pool:
        first.end()
        refuse_other(tmp_path)  # so it can be submitted
        waits = threading.Event()

        def pause(_: float) -> None:
            waits.set()
            released.wait()

        released = threading.Event()
        monkeypatch.setattr(_claim, "time", SimpleNamespace(sleep=pause))
        second = pool.submit(FolderClaim.take, tmp_path, place("2"))
        assert waits.wait(timeout=20)
        first.__exit__(None, None, None)
        released.set()
        assert second.result(timeout=20).held


def test_a_requeued_run_takes_its_folder_over_and_the_earlier_start_notices(tmp_path: Path) -> None:
    with FolderClaim.take(tmp_path, place("1")) as first:
        first.check()
        with FolderClaim.take(tmp_path, place("1", restarts=1)) as second:
            with pytest.raises(errors.JobRunning, match="a later start of the run"):
                first.check()
            second.check()
            with pytest.raises(errors.JobRunning):
                refuse_other(tmp_path)
    refuse_other(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_of_many_runs_that_start_together_one_has_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links")

    if not links:
        monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(_claim, "PAUSE_S", 0.01)

    def claims(run: int) -> bool:
        try:
            FolderClaim.take(tmp_path, place(str(run)))
        except errors.JobRunning:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(claims, range(8))).count(True) == 1


def test_a_run_whose_process_was_killed_has_ended(tmp_path: Path) -> None:
    """Its claim stays."""
    program = (
        "import os, sys, pathlib; from shoal.slurm import _claim, _allocation as a; "
        "_claim.FolderClaim.take(pathlib.Path(sys.argv[1]), a.Allocation(run='1', attempt='1.0', rank=0, tasks=4)); "
        "os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False, timeout=60)
    assert (tmp_path / "00000001").exists()
    FolderClaim.take(tmp_path, place("2"))
    with pytest.raises(errors.JobRunning):
        refuse_other(tmp_path)


@pytest.mark.parametrize(
    ("says", "gone"),
    [(Presence.RUNNING, False), (Presence.WAITING, True), (Presence.ENDED, True), (Presence.UNKNOWN, False)],
)
def test_slurm_says_whether_a_run_on_another_node_has_ended(
    monkeypatch: pytest.MonkeyPatch, says: Presence, gone: bool
) -> None:
    monkeypatch.setattr(_claim, "presence", lambda _: says)
    assert Holder(run="1", attempt="1.0", job="417", host="gpu07/1", pid=1, started="1").gone == gone


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        ("echo RUNNING", Presence.RUNNING),
        ("echo COMPLETING", Presence.RUNNING),
        ("echo PENDING", Presence.WAITING),
        ("echo NODE_FAIL", Presence.ENDED),
        ("true", Presence.ENDED),
        ("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", Presence.ENDED),
        ("echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1", Presence.UNKNOWN),
    ],
)
def test_reads_what_squeue_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: str, found: Presence) -> None:
    (tmp_path / "squeue").write_text(f"#!/bin/sh\n{lines}\n")
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert presence("417") is found


def test_without_squeue_nothing_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert presence("417") is Presence.UNKNOWN


def test_a_claim_that_cannot_be_read_is_respected(tmp_path: Path) -> None:
    (tmp_path / "00000003").write_text("{")
    with pytest.raises(errors.JobRunning, match="unknown"):
        refuse_other(tmp_path)
