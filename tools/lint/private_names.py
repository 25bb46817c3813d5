"""Lint for private names of other modules that tests import, or name in a string.

    python tools/lint/private_names.py

Ruff's SLF rules find `module._name`. This lint finds the other forms, in all files of `tests`:

- `from module import _name`
- `monkeypatch.setattr(module, "_name", ...)`, and the same with `setattr`, `getattr`, `hasattr`, `delattr`, `patch` and
  `patch.object`; also a path in one string, such as `"package.module._name"`
- `vars(value)["_name"]` and `value.__dict__["_name"]`

The private modules and packages of Shoal, such as `shoal._wire`, are no findings: tests may import them. If a library
leaves no other way, end the line with `# private: REASON`.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ("client", "server", "worker")
CALLS = {"setattr", "getattr", "hasattr", "delattr", "patch", "object"}
PRIVATE = re.compile(r"_[^\W_]\w*")
PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
REASON = re.compile(r"# private: \S")


def is_module(path: str, root: Path) -> bool:
    """Returns whether a dotted path is a module or a package of Shoal.

    Args:
        path: the dotted path.
        root: the repository.
    """
    places = [root / source / path.replace(".", "/") for source in SOURCES]
    return any(place.is_dir() or place.with_suffix(".py").is_file() for place in places)


def private_part(path: str, root: Path) -> str:
    """Returns the first private name of a dotted path that is not a module of Shoal; empty if there is none.

    Args:
        path: the dotted path.
        root: the repository.
    """
    parts = path.split(".")
    for number, part in enumerate(parts, 1):
        if PRIVATE.fullmatch(part) and not is_module(".".join(parts[:number]), root):
            return part
    return ""


def named(node: ast.AST) -> Iterator[str]:
    """Yields the dotted paths that an import, a call or a subscript names."""
    match node:
        case ast.ImportFrom(module=str(module), names=names):
            yield from (f"{module}.{each.name}" for each in names)
        case ast.Import(names=names):
            yield from (each.name for each in names)
        case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=given) if called in CALLS:
            yield from (text for text in map(_text, given[:2]) if PATH.fullmatch(text))
        case ast.Subscript(value=ast.Call(func=ast.Name(id="vars")) | ast.Attribute(attr="__dict__"), slice=key):
            yield _text(key)


def findings(text: str, root: Path) -> Iterator[tuple[int, str]]:
    """Yields the findings in a file.

    Args:
        text: the file.
        root: the repository, to tell modules from other names.

    Yields:
        The line and the private name of each finding.
    """
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        for path in named(node):
            name = private_part(path, root)
            if name and not REASON.search(lines[node.lineno - 1]):  # type: ignore[attr-defined]  # each has a line
                yield node.lineno, name  # type: ignore[attr-defined]


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Prints each finding as file:line: name; returns 1 if there is one.

    Args:
        arguments: folders and files to look at, relative to `root`. Default: those of the command line, or `tests`.
        root: the repository.
    """
    places = [root / name for name in (sys.argv[1:] if arguments is None else arguments) or ["tests"]]
    files = [file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])]
    count = 0
    for file in files:
        for line, name in findings(file.read_text(), root):
            print(
                f"{file.relative_to(root).as_posix()}:{line}: {name} is private to its module: test through a public "
                "name, or make it public there"
            )
            count += 1
    return 1 if count else 0


def _text(node: ast.expr) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


if __name__ == "__main__":
    sys.exit(main())
