"""The examples of strategies and their TensorFlow originals: which lines differ."""

import ast
import difflib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "examples" / "distribute"
EXAMPLES = sorted(path.name for path in FOLDER.glob("*.py"))
MOST_LINES = 6


def lines_of(path: Path) -> list[str]:
    """Returns the lines of a module, without imports and empty lines."""
    text = path.read_text(encoding="utf-8")
    imports: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return [line for number, line in enumerate(text.splitlines(), 1) if line and number not in imports]


def differing(ours: list[str], theirs: list[str]) -> int:
    """Returns the number of lines that differ: a changed line counts once."""
    blocks = difflib.SequenceMatcher(None, theirs, ours, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in blocks if kind != "equal")


def test_all_have_an_original() -> None:
    assert sorted(path.name for path in (FOLDER / "originals").glob("*.py")) == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_few_lines_differ(name: str) -> None:
    ours, theirs = lines_of(FOLDER / name), lines_of(FOLDER / "originals" / name)
    assert "shoal" not in "".join(theirs)
    assert differing(ours, theirs) <= MOST_LINES


def test_lines_that_differ_are_counted() -> None:
    assert differing(["a", "b", "c"], ["a", "x", "c"]) == 1
    assert differing(["a", "b", "c", "d"], ["a", "x"]) == 3
