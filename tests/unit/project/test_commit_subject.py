"""The rule for a commit's subject."""

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
