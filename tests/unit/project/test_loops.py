"""The loops of frameworks before and after: few lines change, and the documentation shows these lines."""

import re
from pathlib import Path

import pytest

from support import loops

ROOT = Path(__file__).parents[3]
# Lines that may change in a loop, imports aside.
MOST_CHANGED = 4


@pytest.mark.parametrize("framework", loops.FRAMEWORKS)
def test_few_lines_change(framework: str) -> None:
    assert 0 < loops.changed_lines(framework) <= MOST_CHANGED


@pytest.mark.parametrize(
    ("page", "shown"),
    [("README.md", ["torch", "flax", "keras"]), ("docs/how-to/frameworks.md", loops.FRAMEWORKS)],
)
def test_pages_show_what_changes(page: str, shown: list[str]) -> None:
    blocks = re.findall(r"^```diff\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == len(shown)
    for framework, block in zip(shown, blocks, strict=True):
        found = loops.diff(framework)
        lines = block.splitlines()
        start = found.index(lines[0])
        assert found[start : start + len(lines)] == lines, f"{page} does not show the lines of {framework}_after.py"
        assert [it for it in lines if it[0] != " "] == [it for it in found if it[:1] in ("+", "-")]
