"""The rule for a commit's subject: at most 72 characters, a capital first, no full stop.

    python tools/commits/subject.py FILE                 a message in a file, as a commit-msg hook
    python tools/commits/subject.py --range BASE..HEAD   every commit of a range; only HEAD if BASE is all zeros or gone
    python tools/commits/subject.py --last 30            the last commits, as many as there are in a shallow clone

A subject must also be in the imperative, which only a reviewer can check.
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LONGEST = 72
# Git writes these itself.
_EXEMPT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def faults(message: str) -> list[str]:
    """Returns what is wrong with the subject of a commit message, and what to do; empty if it is right."""
    subject, *rest = message.rstrip("\n").split("\n")
    if subject.startswith(_EXEMPT):
        return []
    found = []
    if len(subject) > LONGEST:
        found.append(f"the subject has {len(subject)} characters, {LONGEST} at most: move the reason to the body")
    if not subject[:1].isupper():
        found.append("the subject begins with a capital: 'Fence a worker before its rank is reassigned'")
    if subject.endswith("."):
        found.append("the subject ends without a full stop")
    if rest and rest[0].strip() and not rest[0].startswith("#"):
        found.append("the line after the subject is empty")
    return found


def faults_of_range(commits: str, repository: Path) -> list[str]:
    """Returns what is wrong with the subjects of a range of commits, each with the commit's short hash.

    Args:
        commits: BASE..HEAD. The first push of a branch has a BASE of zeros, and a forced push one that is not fetched:
            only HEAD is checked then.
        repository: folder of the repository.
    """
    base, _, head = commits.partition("..")
    known = subprocess.run(
        ["git", "cat-file", "-e", f"{base}^{{commit}}"], cwd=repository, capture_output=True, check=False
    )
    return _faults_of_log([commits] if known.returncode == 0 else ["-1", head], repository)


def faults_of_last(count: int, repository: Path) -> list[str]:
    """Returns what is wrong with the subjects of the last commits, each with the commit's short hash.

    Args:
        count: how many commits. A shallow or a young repository has fewer.
        repository: folder of the repository.
    """
    return _faults_of_log([f"-{count}", "HEAD"], repository)


def _faults_of_log(chosen: Sequence[str], repository: Path) -> list[str]:
    listed = subprocess.run(
        ["git", "log", "-z", "--format=%h %B", *chosen], cwd=repository, capture_output=True, text=True, check=True
    )
    found = []
    for entry in filter(None, listed.stdout.split("\0")):
        commit, _, message = entry.partition(" ")
        found += [f"{commit}: {fault}" for fault in faults(message)]
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--range":
        wrong = faults_of_range(sys.argv[2], Path.cwd())
    elif sys.argv[1] == "--last":
        wrong = faults_of_last(int(sys.argv[2]), Path.cwd())
    else:
        wrong = faults(Path(sys.argv[1]).read_text())
    if wrong:
        raise SystemExit("\n".join(wrong))
