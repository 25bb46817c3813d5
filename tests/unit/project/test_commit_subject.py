"""Check of a commit's subject."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[3] / "tools" / "commits"))

import subject


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("Fence a worker before its rank is reassigned\n\nIt could push as the old one.\n", []),
        ("A" * 72 + "\n", []),
        ("A" * 73 + "\n", ["73 characters, 72 at most"]),
        ("fence a worker.\nAt once.\n", ["begins with a capital", "without a full stop", "after the subject is empty"]),
        ("Fence a worker\n# Please enter the commit message\n", []),
        ("Merge branch 'words'\n", []),
        ("\n", ["begins with a capital"]),
    ],
)
def test_a_subject(message: str, said: list[str]) -> None:
    found = subject.faults(message)
    assert len(found) == len(said)
    assert all(part in whole for part, whole in zip(said, found, strict=True))


def test_every_commit_of_a_pushed_range_is_checked(tmp_path: Path) -> None:
    def git(*arguments: str) -> str:
        identity = ("-c", "user.name=A", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        command = ["git", *identity, *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout.strip()

    git("init", "--quiet")
    for message in ("first", "Second", "third.", "Fourth"):
        git("commit", "--quiet", "--allow-empty", "--message", message)
    first, head = git("rev-list", "--max-parents=0", "HEAD"), git("rev-parse", "HEAD")
    third = git("rev-parse", "--short", "HEAD~1")
    found = subject.faults_of_range(f"{first}..{head}", tmp_path)
    assert [line.partition(":")[0] for line in found] == [third, third]
    assert subject.faults_of_range(f"{'0' * 40}..{head}", tmp_path) == []
    assert subject.faults_of_last(1, tmp_path) == []
    assert len(subject.faults_of_last(2, tmp_path)) == 2
    assert len(subject.faults_of_last(30, tmp_path)) == 3
