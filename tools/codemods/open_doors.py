"""Codemod that gives packages a door: `__init__` re-exports what other packages import, and they import from there.

    python tools/codemods/open_doors.py shoal._wire shoal_server.shards

Two kinds of modules are not re-exported, and are still imported by their own names: those that others import as an
object (`from shoal._display import records`), and those that others import inside a function, so that they are loaded
late. The imports of tests do not change. Running it again adds what is missing.
"""

import ast
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Open whoever imports them: they load what a door should not.
OPEN = {"shoal._role": {"web_server", "app"}}
FOLDERS = {"shoal": "client", "shoal_server": "server", "shoal_coordinator": "server"}
FOLDERS |= {"shoal_worker": "worker", "shoal_nn": "worker"}


def folder_of(package: str) -> Path:
    """Where a package lies."""
    parts = package.split(".")
    return ROOT / FOLDERS[parts[0]] / Path(*parts)


def sources() -> list[Path]:
    """The modules that go through doors."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    own = ("client/", "server/", "worker/", "benchmarks/", "examples/")
    return [ROOT / name for name in listed.split() if name.startswith(own) and "/v1/" not in name]


def late(tree: ast.Module) -> set[ast.ImportFrom]:
    """Imports inside functions."""
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {node for function in functions for node in ast.walk(function) if isinstance(node, ast.ImportFrom)}


class Door:
    """One package's door.

    Args:
        package: its dotted name.
    """

    def __init__(self, package: str) -> None:
        self.package, self.folder = package, folder_of(package)
        self.leaves = {path.stem for path in self.folder.glob("*.py")} - {"__init__"}
        self.open = set(OPEN.get(package, ()))  # leaves that others import as objects, or late
        self.names: dict[str, str] = {}  # name = leaf

    def look(self, tree: ast.Module) -> None:
        """Takes in what a file outside imports."""
        functions = late(tree)
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom):
                continue
            if node.module == self.package:
                self.open |= {alias.name for alias in node.names} & self.leaves
            leaf = self.leaf(node)
            if leaf and node in functions:
                self.open.add(leaf)

    def collect(self, tree: ast.Module) -> None:
        """Takes in the names that a file outside imports from the leaves that are not open."""
        for node in ast.walk(tree):
            leaf = self.leaf(node) if isinstance(node, ast.ImportFrom) else None
            if leaf and leaf not in self.open:
                for alias in node.names:  # type: ignore[attr-defined] # it is an import
                    assert self.names.setdefault(alias.name, leaf) == leaf, f"two modules have {alias.name}"

    def leaf(self, node: ast.ImportFrom) -> str | None:
        """The module of this package that an import is from."""
        package, _, leaf = (node.module or "").rpartition(".")
        return leaf if package == self.package and leaf in self.leaves else None

    def rewrite(self, path: Path) -> None:
        """Has a file import from the door."""
        text = path.read_text()
        lines = text.split("\n")
        edits = []
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and (leaf := self.leaf(node)) and leaf not in self.open:
                names = ", ".join(it.name + (f" as {it.asname}" if it.asname else "") for it in node.names)
                edits.append(
                    (node.lineno, node.end_lineno, f"{' ' * node.col_offset}from {self.package} import {names}")
                )
        for start, end, line in sorted(edits, reverse=True):
            lines[start - 1 : end] = [line]
        if edits:
            path.write_text("\n".join(lines))

    def write(self) -> None:
        """Writes `__init__`, below the docstring that it has."""
        path = self.folder / "__init__.py"
        text = path.read_text()
        tree = ast.parse(text)
        for node in tree.body:  # what the door has already
            if isinstance(node, ast.ImportFrom) and (leaf := self.leaf(node)):
                self.names |= {alias.name: leaf for alias in node.names}
        by_leaf: dict[str, list[str]] = defaultdict(list)
        for name, leaf in self.names.items():
            by_leaf[leaf].append(name)
        imports = [f"from {self.package}.{leaf} import {', '.join(sorted(names))}" for leaf, names in by_leaf.items()]
        names = "".join(f'    "{name}",\n' for name in sorted(self.names))
        docstring = "\n".join(text.split("\n")[: tree.body[0].end_lineno])
        body = "\n".join(sorted(imports)) + f"\n\n__all__ = [\n{names}]\n" if self.names else ""
        path.write_text(docstring + "\n" + (f"\n{body}" if body else ""))


def main() -> None:
    """Opens the doors that are named."""
    for package in sys.argv[1:]:
        door = Door(package)
        outside = [path for path in sources() if door.folder not in path.parents]
        trees = [ast.parse(path.read_text()) for path in outside]
        for tree in trees:
            door.look(tree)
        for tree in trees:
            door.collect(tree)
        door.write()
        for path in outside:
            door.rewrite(path)
        print(f"{package}: {len(door.names)} names; imported by their own names: {sorted(door.open) or 'none'}")


if __name__ == "__main__":
    main()
