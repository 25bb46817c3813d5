"""The loops of frameworks in `examples`, before and after they train in a job, and the lines in which they differ."""

import ast
import difflib
from pathlib import Path

LOOPS = Path(__file__).parents[2] / "examples"
FRAMEWORKS = ("torch", "flax", "keras", "transformers")


def changed_lines(framework: str) -> int:
    """Returns how many lines of a loop change, without its docstring and its imports.

    Where lines take the place of others, the larger number counts.
    """
    before, after = (_body(framework, when) for when in ("before", "after"))
    steps = difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes()
    return sum(max(i2 - i1, j2 - j1) for kind, i1, i2, j1, j2 in steps if kind != "equal")


def diff(framework: str) -> list[str]:
    """Returns the lines of `main`, after "+" if they are new, "-" if they are no more, or else " "."""
    before, after = (_main(framework, when) for when in ("before", "after"))
    found = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            found += [f" {line}".rstrip() for line in before[i1:i2]]
        else:
            found += [f"-{line}" for line in before[i1:i2]]
            found += [f"+{line}" for line in after[j1:j2]]
    return found


def _body(framework: str, when: str) -> list[str]:
    text = (LOOPS / f"{framework}_{when}.py").read_text()
    tree = ast.parse(text)
    start = max(it.end_lineno or 0 for it in tree.body if isinstance(it, ast.Import | ast.ImportFrom))
    return [line for line in text.splitlines()[start:] if line.strip()]


def _main(framework: str, when: str) -> list[str]:
    """Returns the lines of the function `main`, without its indentation."""
    text = (LOOPS / f"{framework}_{when}.py").read_text()
    found = next(it for it in ast.parse(text).body if isinstance(it, ast.FunctionDef) and it.name == "main")
    return [line[4:] for line in text.splitlines()[found.lineno : found.end_lineno]]
