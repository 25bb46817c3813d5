"""Lint of the docstrings that make the API reference: a function with three parameters or more explains each of them.

    python tools/lint/docstrings.py

It looks at public functions and methods of public modules, for which ruff already demands a docstring. The docstring
has a section Args that names every parameter, says what is returned (a section Returns or Yields, or a first line that
begins with that verb) and has a section Raises for each exception that the function itself raises.
A method without a docstring overrides one that has it.
"""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("client/shoal", "worker/shoal_nn")
FEW = 2  # parameters that a first line can explain
RETURNS = re.compile(r"\b(Returns|Yields|Iterates)\b")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> Iterator[Path]:
    """Yields the public modules: no part of their path begins with an underscore, but for `__init__`."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT / package).with_suffix("").parts
            if "v1" not in parts and not any(part.startswith("_") and part != "__init__" for part in parts):
                yield path


def public_functions(tree: ast.Module) -> Iterator[tuple[str, Function, str | None]]:
    """Yields the public functions of a module and of its public classes: qualified name, function, docstring.

    The docstring of a class explains its constructor.
    """
    for node in tree.body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            yield node.name, node, ast.get_docstring(node)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, Function) and (inner.name == "__init__" or not inner.name.startswith("_")):
                    documented = node if inner.name == "__init__" else inner
                    yield f"{node.name}.{inner.name}", inner, ast.get_docstring(documented)


def parameters(function: Function) -> list[str]:
    """Returns the names of a function's parameters, without self, cls and those that begin with an underscore."""
    found = function.args
    names = [each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
    names += [each.arg for each in (found.vararg, found.kwarg) if each]
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def raised(function: Function) -> set[str]:
    """Returns the names of the exceptions of `shoal.errors` that a function raises itself."""
    calls = (
        node.exc.func for node in ast.walk(function) if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)
    )
    return {call.attr for call in calls if isinstance(call, ast.Attribute) and ast.unparse(call.value) == "errors"}


def problems(function: Function, text: str | None) -> Iterator[str]:
    """Yields what is missing in a function's docstring."""
    names = parameters(function)
    if text is None or len(names) <= FEW:
        return
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n?|\n)*)", text, re.MULTILINE)
    listed = section.group(1) if section else ""
    if missing := [name for name in names if not re.search(rf"^\s+[\w*, ]*\b{name}\b[\w, ]*:", listed, re.MULTILINE)]:
        yield f"Args lacks {', '.join(missing)}"
    result = ast.unparse(function.returns) if function.returns else "None"
    if result not in ("None", "Self", "NoReturn") and not RETURNS.search(text):
        yield "Returns is missing"
    if lacking := [name for name in sorted(raised(function)) if name not in text]:
        yield f"Raises lacks {', '.join(lacking)}"


def main() -> int:
    """Prints each problem as file:line: function: problem; returns 1 if there is one."""
    count = 0
    for path in modules():
        for name, function, text in public_functions(ast.parse(path.read_text())):
            for problem in problems(function, text):
                sys.stdout.write(f"{path.relative_to(ROOT)}:{function.lineno}: {name}: {problem}\n")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
